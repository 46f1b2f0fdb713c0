"""Stops a run on a signal or a request, and says what it waits for, however long that takes."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

from pipeline import events
from pipeline.cli.context import say
from pipeline.execute.event_log import EventLog
from pipeline.execute.stop_request import stop_on_request
from pipeline.pages.readable import duration

REPORT_SECONDS = 30.0
_SIGNALLED = (
    "stopping: what is in flight is finished first, and training saves a checkpoint; "
    "Ctrl-C again ends it at once"
)
_REQUESTED = "stopping, requested by `ponente stop`: work in flight is finished first"


class Stopping:
    """Stops a run, and reports it."""

    def __init__(self, prefix: str, log: EventLog, *stops: Callable[[], None]) -> None:
        self._prefix, self._log, self._stops = prefix, log, stops
        self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __call__(self, line: str = _SIGNALLED) -> None:
        self._requests.put(line)
        for stop in self._stops:
            stop()

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """While the block runs, obey requests in the store, and report a stop and its progress."""
        thread = threading.Thread(target=self._report, name="stopping", daemon=True)
        thread.start()
        try:
            with stop_on_request(self._prefix, self._log.record.run, lambda: self(_REQUESTED)):
                yield
        finally:
            self._requests.put("")
            thread.join()

    def _report(self) -> None:
        line, since = self._requests.get(), time.monotonic()
        while line:
            say(line, error=True)
            self._log.emit(events.Stopping(line))
            try:
                line = self._requests.get(timeout=REPORT_SECONDS)
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
