"""The time journal of one attempt, written while it runs, so that a kill loses only seconds of it.

A thread writes `<directory>/<attempt>.json` atomically every ten seconds, after the start of every
save and at the end. The journal holds the seconds by bucket and the steps done, both now and at
each checkpoint; `training.metrics.goodput` combines the journals of all attempts into the account
of the run. Errors are logged and never reach the run.

The start time is Unix time, comparable between attempts; durations come from a monotonic clock.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipeline.store import storage
from training.metrics.startup import Startup
from training.metrics.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

FORMAT = 1
INTERVAL_SECONDS = 10.0
SPACING_SECONDS = 1.0
MOST_MARKS = 2000
# The attempt names of `pipeline.execute.attempt`: the lease number, which only rises, and a nonce.
_NAME = re.compile(r"[0-9]{6,18}-[0-9a-f]{8}")


@dataclass(frozen=True)
class Mark:
    """A checkpoint, and the seconds of every bucket when its state was copied."""

    step: int
    buckets: Mapping[str, float]

    @property
    def at(self) -> float:
        """Seconds since the attempt began."""
        return sum(self.buckets.values())


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The content of a journal.

    Attributes:
        attempt: name of the attempt.
        began: Unix time of its start.
        buckets: seconds by bucket when the journal was written.
        first_step: step of the checkpoint that the attempt resumed from, or 0; None until its state
            is ready, so also for an attempt that ended while restoring or compiling.
        last_step: optimizer steps done when the journal was written.
        outcome: "running" (also of a killed attempt), "finished", "preempted" or "failed".
        marks: its checkpoints, by step; the newest 2,000.
        device: kind of device.
        devices: number of devices.
        processes: number of processes.
        startup: seconds of those parts of `training.metrics.startup.PARTS` that have ended.
        loaded: whether it loaded the compiled step of an earlier attempt.
    """

    attempt: str
    began: float
    buckets: Mapping[str, float]
    first_step: int | None = None
    last_step: int = 0
    outcome: str = "running"
    marks: tuple[Mark, ...] = ()
    device: str = ""
    devices: int = 0
    processes: int = 1
    startup: Mapping[str, float] = field(default_factory=dict)
    loaded: bool = False

    @property
    def seconds(self) -> float:
        """Seconds from its start to the journal's last write."""
        return sum(self.buckets.values())

    def to_json(self) -> bytes:
        """The content of a journal file."""
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    @staticmethod
    def from_json(text: bytes) -> Attempt:
        """The inverse of `to_json`. Raises `ValueError` when `text` is not a journal."""
        try:
            tree = json.loads(text)
            found = tree.pop("format")
            if found != FORMAT:
                raise ValueError(f"expected a journal of format {FORMAT}, found {found!r}")
            tree["marks"] = tuple(Mark(**mark) for mark in tree["marks"])
            return Attempt(**tree)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a journal: {error!r}") from error


class Journal:
    """Writes the journal of this attempt; only process 0 has one.

    Args:
        directory: directory of the journals of all attempts of the run.
        attempt: name of this attempt.
        watch: stopwatch with the seconds by bucket.
        startup: stopwatch of the startup parts.
        device, devices, processes: see `Attempt`.
        interval: longest time between two writes, in seconds.
        write: writes bytes to a URL atomically.
        unix: returns the Unix time; called once.
    """

    def __init__(
        self,
        directory: str,
        attempt: str,
        watch: Stopwatch,
        startup: Startup | None = None,
        *,
        device: str = "",
        devices: int = 0,
        processes: int = 1,
        interval: float = INTERVAL_SECONDS,
        write: Callable[[str, bytes], None] | None = None,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._url = storage.join(directory, f"{attempt}.json")
        self._watch = watch
        self._startup = startup or Startup()
        self._interval = interval
        self._write = write or _write
        # Immutable and replaced as a whole: the writer thread may read it at any time.
        self._attempt = Attempt(
            attempt=attempt,
            began=unix() - sum(watch.seconds().values()),
            buckets={},
            device=device,
            devices=devices,
            processes=processes,
        )
        self._warned = False
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def begin(self, step: int, *, loaded: bool = False) -> None:
        """Record that the run resumes from the checkpoint of `step`, or begins at step 0."""
        self._update(first_step=step, last_step=step, loaded=loaded)

    def step(self, step: int) -> None:
        """Record that `step` steps are done."""
        self._update(last_step=step)

    def mark(self, step: int) -> None:
        """Record that the state after `step` was just copied for a checkpoint.

        The time of the copy counts, not that of the commit: an attempt that resumes from the
        checkpoint redoes the steps in between. The first steps of later attempts show which
        checkpoints were committed.
        """
        marks = (*self._attempt.marks[1 - MOST_MARKS :], Mark(step, self._watch.seconds()))
        self._update(last_step=step, marks=marks)
        self._wake.set()

    def close(self, outcome: str, seconds: float = 5.0) -> None:
        """Write the final journal and end the thread.

        Args:
            outcome: "finished", "preempted" or "failed".
            seconds: longest wait, after which the thread is abandoned.
        """
        self._update(outcome=outcome)
        self._closed.set()
        self._wake.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn_once("the store does not answer")

    def snapshot(self) -> Attempt:
        """The journal's content until now."""
        seconds = self._watch.seconds()
        return replace(self._attempt, buckets=seconds, startup=self._startup.seconds())

    def _update(self, **fields: Any) -> None:
        self._attempt = replace(self._attempt, **fields)

    def _work(self) -> None:
        while True:
            closed = self._closed.is_set()
            try:
                self._write(self._url, self.snapshot().to_json())
            except Exception as error:  # noqa: BLE001 - the journal must never end the run
                self._warn_once(repr(error))
            if closed:
                return
            # Checkpoints in quick succession share a write.
            self._closed.wait(min(SPACING_SECONDS, self._interval))
            self._wake.wait(self._interval)
            self._wake.clear()

    def _warn_once(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("%s: the journal of this attempt has gaps: %s", self._url, reason)


def _write(url: str, data: bytes) -> None:
    # No fsync: a power failure may lose the journal's last seconds.
    storage.write_atomic(url, data, durable=False)


def read_journals(directory: str) -> list[Attempt]:
    """The journals of all attempts, `in_order`; skips unreadable ones with a warning."""
    found = []
    for name in storage.list_names(directory):
        if not name.endswith(".json"):
            continue
        url = storage.join(directory, name)
        try:
            found.append(Attempt.from_json(storage.read_bytes(url)))
        except (ValueError, FileNotFoundError) as error:
            logger.warning("%s: left out of the account: %s", url, error)
    return in_order(found)


def in_order(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Attempts by lease number when all names have one, otherwise by start time.

    Lease numbers do not depend on clocks; two machines' clocks may differ by an hour.
    """
    found = sorted(attempts, key=lambda each: (each.began, each.attempt))
    leases = [_NAME.fullmatch(each.attempt) for each in found]
    if not all(leases):
        return found
    return sorted(found, key=lambda each: int(each.attempt.partition("-")[0]))
