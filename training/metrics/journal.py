"""The account of one attempt at a run, written while it runs, so that a kill loses seconds of it.

A thread writes `<directory>/<attempt>.json` every ten seconds, after every checkpoint that was
begun and at the end, whole or not at all. It says how the time was spent so far, how far the
training got, and how both stood when each checkpoint was taken: `training.metrics.goodput` makes
the account of a run with many attempts from it. Nothing that goes wrong here reaches the run.

Unix time is for people. How long something took comes from a clock that does not jump.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field

from pipeline.store import storage
from training.metrics.startup import Startup
from training.metrics.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

FORMAT = 1
INTERVAL_SECONDS = 10.0
SPACING_SECONDS = 1.0
MOST_MARKS = 2000
OUTCOMES = ("running", "finished", "preempted", "failed")
# As `pipeline.execute.attempt` names attempts: the lease's number, which only rises, and a nonce.
_NAME = re.compile(r"[0-9]{6,18}-[0-9a-f]{8}")


@dataclass(frozen=True)
class Mark:
    """A checkpoint, and the seconds of every bucket when its state was taken."""

    step: int
    buckets: Mapping[str, float]

    @property
    def at(self) -> float:
        """Seconds since the attempt began."""
        return sum(self.buckets.values())


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What a journal says.

    Attributes:
        attempt: its name.
        began: Unix time.
        buckets: seconds by bucket until the last sign of life.
        first_step: optimizer steps done when it had its state: of the checkpoint it resumed from,
            or 0. None until then, so also of one that ended in restoring or compiling.
        last_step: steps done at the last sign of life.
        outcome: "running" also of one that was killed.
        marks: the checkpoints, by step; the newest 2,000.
        device: kind of device, `devices` of them, over `processes` processes.
        startup: seconds from the gang's start to the end of the first step, by
            `training.metrics.startup.PARTS`; of the parts that ended.
        loaded: whether its compiled step was an earlier attempt's.
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
        """From its beginning to its last sign of life."""
        return sum(self.buckets.values())

    def to_json(self) -> bytes:
        """As a journal's file holds it."""
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    @staticmethod
    def from_json(text: bytes) -> Attempt:
        """Raises `ValueError` for what is no journal."""
        try:
            tree = json.loads(text)
            found = tree.pop("format")
            if found != FORMAT:
                raise ValueError(f"expected a journal of format {FORMAT}, found {found!r}")
            tree["marks"] = tuple(Mark(**mark) for mark in tree["marks"])
            return Attempt(**tree)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no journal: {error!r}") from error


class Journal:
    """Writes the account of this attempt; process 0 has one.

    Args:
        directory: shared by all attempts at the run.
        attempt: name of this one.
        watch: whose buckets are written down.
        startup: whose parts are written down.
        device, devices, processes: what it runs on.
        interval: seconds between two writes, at most.
        write: puts bytes at a URL, whole or not at all.
        unix: the time of day, asked once.
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
        self._fixed = {
            "attempt": attempt,
            "began": unix() - sum(watch.nanoseconds().values()) / 1e9,
            "device": device,
            "devices": devices,
            "processes": processes,
        }
        self._first: int | None = None
        self._loaded = False
        self._last = 0
        self._outcome = "running"
        # Replaced and never changed: the thread reads it at any moment.
        self._marks: tuple[Mark, ...] = ()
        self._complained = False
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="journal", daemon=True)
        self._thread.start()

    def begin(self, step: int, *, loaded: bool = False) -> None:
        """The run resumes from the checkpoint of `step`, or begins at 0."""
        self._first = self._last = step
        self._loaded = loaded

    def step(self, step: int) -> None:
        """So many steps are done."""
        self._last = step

    def mark(self, step: int) -> None:
        """The state after `step` was just taken for a checkpoint.

        Not when it was committed: what the run did in between is done again by an attempt that
        resumes from it. Which checkpoints were committed shows in what later attempts began with.
        """
        self._last = step
        self._marks = (*self._marks[1 - MOST_MARKS :], Mark(step, self._watch.seconds()))
        self._wake.set()

    def close(self, outcome: str, seconds: float = 5.0) -> None:
        """Write the last account and end the thread, or leave it behind after so long.

        Args:
            outcome: one of `OUTCOMES`.
            seconds: to wait.
        """
        self._outcome = outcome
        self._closed.set()
        self._wake.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._complain("the store does not answer")

    def snapshot(self) -> Attempt:
        """The account until now."""
        return Attempt(
            **self._fixed,
            buckets=self._watch.seconds(),
            first_step=self._first,
            last_step=self._last,
            outcome=self._outcome,
            marks=self._marks,
            startup=self._startup.seconds(),
            loaded=self._loaded,
        )

    def _work(self) -> None:
        while True:
            closed = self._closed.is_set()
            try:
                self._write(self._url, self.snapshot().to_json())
            except Exception as error:  # noqa: BLE001 - an account must never end what it is of
                self._complain(repr(error))
            if closed:
                return
            # Checkpoints that follow each other closely share a write.
            self._closed.wait(min(SPACING_SECONDS, self._interval))
            self._wake.wait(self._interval)
            self._wake.clear()

    def _complain(self, reason: str) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("%s: the account of this attempt has gaps: %s", self._url, reason)


def _write(url: str, data: bytes) -> None:
    # Not flushed to the disk: a power cut may take some seconds of an account.
    storage.write_atomic(url, data, durable=False)


def read_journals(directory: str) -> list[Attempt]:
    """All attempts' accounts, `in_order`; what is no account is left out, with a warning."""
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
    """In the order they were made: by lease where all names tell it, else by the time they began.

    No clock decides who holds a lease, and two machines' clocks may be an hour apart.
    """
    found = sorted(attempts, key=lambda each: (each.began, each.attempt))
    leases = [_NAME.fullmatch(each.attempt) for each in found]
    if not all(leases):
        return found
    return sorted(found, key=lambda each: int(each.attempt.partition("-")[0]))
