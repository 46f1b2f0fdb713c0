"""The records of runs, read from their event logs.

`<prefix>/events/<run id>.jsonl` is a log, to which the driver appends during the run. A driver can
be killed at any moment, so the last line may be torn and the end may be missing; neither is an
error. The driver summarises the log again and again (see `run_summary.py`), so that readers begin
where it did.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

import msgspec

from pipeline import events
from pipeline.execute.run_record import RunRecord
from pipeline.store import process, run_summary, storage
from pipeline.store.append import Tail
from pipeline.store.parallel import concurrently

_KILLED_AFTER = 900.0  # seconds without an event, for a run without a summary


class Follower:
    """Reads a run's record, later only what was appended."""

    def __init__(self, prefix: str, run_id: str) -> None:
        self._prefix, self._rest, self._torn = prefix, b"", 0
        self._judged = -run_summary.BEAT_SECONDS  # when `alive` was judged, on the monotonic clock
        self._record, read = RunRecord(run_id), 0
        url, summary = run_summary.log_url(prefix, run_id), run_summary.load_summary(prefix, run_id)
        with contextlib.suppress(KeyError, TypeError, ValueError, msgspec.ValidationError):
            record = msgspec.convert({**summary["record"], "run": run_id}, RunRecord)
            driver, at = dict(summary["process"]), int(summary["read"])
            # After a power failure a disk may have the summary without all that it summarises.
            if not storage.is_local(url) or at <= (storage.size(url) or 0):
                self._record, read, self._torn = record, at, record.torn
                record.driver = driver
        self._tail = Tail(url, read)

    def look(self, age: float | None = None) -> RunRecord:
        """The record as it is now; the same object at every look.

        `age` are the seconds since the run's summary was written, for a caller that knows them.
        """
        record = self._record
        if not record.outcome:
            *lines, self._rest = (self._rest + self._tail.more()).split(b"\n")
            for line in filter(bytes.strip, lines):
                try:
                    event = events.from_line(line)
                    record.apply(event)
                except ValueError:
                    self._torn += 1
            record.torn = self._torn + bool(self._rest)
        record.alive = not record.outcome and self._lives(age)
        return record

    def _lives(self, age: float | None) -> bool:
        record = self._record
        if not record.driver:
            return time.time() - record.last <= _KILLED_AFTER
        if age is not None:
            return run_summary.lives(self._prefix, record.run, record.driver, age)
        here = process.is_here(record.driver)
        if not here and time.monotonic() - self._judged < run_summary.BEAT_SECONDS:
            return record.alive
        self._judged = time.monotonic()
        return run_summary.lives(self._prefix, record.run, record.driver)


def read(prefix: str, run_id: str) -> RunRecord:
    found = Follower(prefix, run_id).look()
    if not found.driver and not storage.exists(url := run_summary.log_url(prefix, run_id)):
        raise FileNotFoundError(f"{url}: found no log of this run")
    return found


def runs(prefix: str, newest: int = 100) -> list[RunRecord]:
    """The `newest` runs in a store, newest first: a store may have years of runs."""
    return next(batches(prefix, newest), [])


def every(prefix: str) -> Iterator[RunRecord]:
    """As `runs`, without an end: earlier ones are read when they are asked for."""
    return itertools.chain.from_iterable(batches(prefix))


def batches(prefix: str, size: int = 100) -> Iterator[list[RunRecord]]:
    """The runs in a store, `size` at a time by name, which starts with the date, newest first."""
    pages = set(storage.list_names(storage.join(prefix, "reports")))

    def record(run: str) -> RunRecord:
        found = Follower(prefix, run).look()
        found.page = f"{run}.html" in pages
        return found

    names = sorted(run_summary.run_ids(prefix), reverse=True)
    for begin in range(0, len(names), size):
        found = concurrently(record, names[begin : begin + size], prefix)
        yield sorted(found, key=lambda r: (r.started, r.run), reverse=True)
