"""The event log of a run, written by the driver alone, and its summary.

A log that cannot be written, or a listener that raises, fails no run: each is reported once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from pipeline import events
from pipeline.errors import PonenteError, one_line
from pipeline.events import Event
from pipeline.execute.run_record import RunRecord
from pipeline.store import run_summary, storage
from pipeline.store.append import Appender

Listener = Callable[[Event], None]

_PROGRESS_SECONDS = 5.0  # between two progress lines of one step in the log

logger = logging.getLogger("ponente")


class EventLog:
    """Appends events to the log `<prefix>/events/<run id>.jsonl` and passes them to listeners.

    `record` is what they said, the latest included. From `protect` on a thread writes the run's
    summary every minute, which says that the driver lives.
    """

    def __init__(self, prefix: str, run_id: str, listeners: list[Listener]) -> None:
        self.record = RunRecord(run_id)
        self.url = run_summary.log_url(prefix, run_id)
        self._prefix = prefix
        self._listeners = listeners
        self._file = Appender(self.url)
        self._bytes = 0
        # By key: the latest progress that is not written yet, and when progress was last written.
        self._latest: dict[str, bytes] = {}
        self._kept: dict[str, float] = {}
        self._reported: set[str] = set()
        self._lock = threading.RLock()  # threads of the store's clients report retries
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-summary", daemon=True)

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        """Write an event to the log and pass it to the listeners; adds the time if it has none."""
        with self._lock:
            if not event.time:
                event = msgspec.structs.replace(event, time=time.time())
            self.record.apply(event)
            if not isinstance(event, events.Output):  # which is in the step's log
                self._keep(event)
            for listener in list(self._listeners):
                try:
                    listener(event)
                except Exception as error:  # noqa: BLE001 - a display must not fail a run
                    self._listeners.remove(listener)
                    name, cause = type(listener).__name__, one_line(error)
                    logger.warning("%s stopped showing this run: %s", name, cause)

    def _keep(self, event: Event) -> None:
        line, key, now = events.encode(event) + b"\n", event.key, time.monotonic()
        if isinstance(event, events.Progress):
            if now - self._kept.get(key, -_PROGRESS_SECONDS) < _PROGRESS_SECONDS:
                self._latest[key] = line
                return
            self._kept[key] = now
            self._latest.pop(key, None)
        self._write(self._latest.pop(key, b"") + line)

    def _write(self, lines: bytes) -> None:
        self._bytes += len(lines)
        try:
            self._file.write(lines)
        except OSError as error:
            self._report("events cannot be written", error)

    def _report(self, what: str, error: Exception) -> None:
        if what not in self._reported:
            logger.warning("%s: %s: %s", self.url, what, error)
        self._reported.add(what)

    def protect(self) -> None:
        """Write the first summary, without which the run has no protection; raises its error."""
        self._save()
        self._thread.start()

    def _save(self) -> None:
        with self._lock:  # the record is what the first `_bytes` of the log say, or will
            summary = run_summary.encode(self.record, self._bytes)
        run_summary.save(self._prefix, self.record.run, summary)

    def _beat(self) -> None:
        while not self._over.wait(run_summary.BEAT_SECONDS):
            self._try_to_save()

    def _try_to_save(self) -> None:
        try:
            self._save()
        except (OSError, PonenteError) as error:
            self._report("the summary of the run cannot be written", error)

    def keep_diff(self, diff: str) -> str:
        """Write the diff of uncommitted code; returns its path in the store, empty for none."""
        url = self.url.removesuffix(".jsonl") + ".diff"
        if not diff:
            return ""
        try:
            storage.write_atomic(url, diff.encode(errors="surrogateescape"))
        except (OSError, PonenteError) as error:
            self._report("the diff of uncommitted code cannot be written", error)
            return ""
        return "/".join(url.rsplit("/", 2)[1:])

    def close(self) -> None:
        """Write pending events and the last summary, and close the log."""
        with self._lock:
            self._write(b"".join(self._latest.values()))
            self._latest.clear()
        if self._thread.ident is not None:
            self._over.set()
            self._thread.join()
            self._try_to_save()
        self._file.close()
