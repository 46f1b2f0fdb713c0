"""Stops a run on a signal or a request, and says what it waits for, however long that takes.

A request is a small object next to the run's event log: it reaches a driver that users cannot
signal. The driver checks for it every `LOOK_SECONDS` and stops as for Ctrl-C: shards in flight are
finished, and training saves a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator

from pipeline import events
from pipeline.cli.context import say
from pipeline.errors import PonenteError
from pipeline.execute.event_log import EventLog
from pipeline.pages.readable import duration
from pipeline.store import storage

LOOK_SECONDS = 10.0  # each check is one request to an object store
REPORT_SECONDS = 30.0
_SIGNALLED = (
    "stopping: what is in flight is finished first, and training saves a checkpoint; "
    "Ctrl-C again ends it at once"
)
_REQUESTED = "stopping, requested by `ponente stop`: work in flight is finished first"


def _url(prefix: str, run_id: str) -> str:
    return storage.join(prefix, "events", f"{run_id}.stop")


def request_stop(prefix: str, run_id: str) -> None:
    """Ask the driver of a run to stop it; idempotent."""
    storage.create(_url(prefix, run_id), json.dumps({"time": time.time()}).encode())


class Stopping:
    """Stops a run by calling `stops`, which a signal handler may call too, and reports it."""

    def __init__(self, prefix: str, log: EventLog, *stops: Callable[[], None]) -> None:
        self._request = _url(prefix, log.record.run)
        self._log, self._stops = log, stops
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._over = threading.Event()

    def __call__(self, line: str = _SIGNALLED) -> None:
        self._lines.put(line)  # another thread prints it
        for stop in self._stops:
            stop()

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """While the block runs, obey requests in the store, and report a stop and its progress."""
        threading.Thread(target=self._watch, name="stop requests", daemon=True).start()
        reporter = threading.Thread(target=self._report, name="stopping", daemon=True)
        reporter.start()
        try:
            yield
        finally:
            self._over.set()
            self._lines.put("")
            reporter.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            # A store that does not answer is checked again at the next interval.
            with contextlib.suppress(PonenteError, OSError):
                if storage.exists(self._request):
                    return self(_REQUESTED)

    def _report(self) -> None:
        line, since = self._lines.get(), time.monotonic()
        while line:
            say(line, error=True)
            self._log.emit(events.Stopping(line))
            try:
                line = self._lines.get(timeout=REPORT_SECONDS)
            except queue.Empty:
                line = f"stopping for {duration(time.monotonic() - since)}: {self._awaited()}"

    def _awaited(self) -> str:
        steps = [
            f"{step.label}, running since {time.strftime('%H:%M:%S', time.localtime(began))}"
            for step in self._log.record.among("running")
            for began in [step.attempts[-1].started]
        ]
        what = "; ".join(steps) or "a step that has not begun"
        return f"waiting for {what}; Ctrl-C again ends it at once"
