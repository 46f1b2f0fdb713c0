"""Stops a run on Ctrl-C, a plain `kill` or a request, and says what it waits for.

A request is a small object next to the run's event log, for which the driver looks. A run that is
stopped finishes shards in flight, and training saves a checkpoint; a second signal ends it at once.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from pipeline import events
from pipeline.cli.context import say
from pipeline.errors import PonenteError
from pipeline.execute.event_log import EventLog
from pipeline.pages.readable import duration
from pipeline.store import storage

BUDGET_SECONDS = 1.0  # between two looks at what is spent, which ask no store
LOOK_SECONDS = 10.0  # each check is one request to an object store
REPORT_SECONDS = 30.0
END_SECONDS = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"
INTERRUPTED = "interrupted; finished steps are kept, run it again to resume"
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


class Stopper:
    """Stops a run by calling `stops`, which a signal handler may call too, and reports it.

    `reached` says why it has to stop by itself; empty while it need not.
    """

    def __init__(
        self,
        prefix: str,
        log: EventLog,
        *stops: Callable[[], None],
        reached: Callable[[], str] = str,
    ) -> None:
        self._request = _url(prefix, log.record.run)
        self._log, self._stops, self._reached = log, stops, reached
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
        looked = time.monotonic()
        while not self._over.wait(min(BUDGET_SECONDS, LOOK_SECONDS)):
            if why := self._reached():
                return self(why)
            if time.monotonic() - looked >= LOOK_SECONDS:
                looked = time.monotonic()
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


class Interrupts:
    """Context in which a first Ctrl-C or `kill` stops a run, and a second one ends it.

    `alone`, the process has no other work: both signals are the run's all the time, and one that
    does not stop the run ends the process within `END_SECONDS`, with all that it started. Else
    anything is installed only while `stopping` lasts: every other signal raises
    `KeyboardInterrupt` or does what the program itself made of it.

    A signal handler runs between any two bytecode instructions of the main thread, which may hold
    any lock. So it only sets flags and raises; threads print, and end the process.
    """

    def __init__(self, *, alone: bool = True) -> None:
        self.status = 130
        self._alone, self._ending, self._count = alone, False, 0
        self._stop: Callable[[], None] | None = None
        self._previous: dict[int, Any] = {}
        # SimpleQueue.put is reentrant, so a signal handler may call it.
        self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __enter__(self) -> Interrupts:
        # Now, since Ray installs its own at start and does not take them back.
        self._previous = {number: signal.getsignal(number) for number in _SIGNALS}
        if self._alone:
            threading.Thread(target=self._serve, name="interrupts", daemon=True).start()
            self._install()
            if threading.current_thread() is threading.main_thread():
                # A closed ssh session must not end the run; Ray's processes inherit SIG_IGN.
                self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        if self._alone:
            if not self._ending:
                self._requests.put("over")
            _ignore_at_exit()

    def _install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, self._handle)

    def _restore(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextlib.contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """While the block runs, the first signal calls `stop` instead of ending the run."""
        self._stop = stop
        self._install()
        try:
            yield
        finally:
            self._stop = None
            if not self._alone:
                self._restore()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let only a second signal interrupt this block; a first one raises at its end."""
        count = self._count
        with self.stopping(lambda: None):
            yield
        if self._count > count and sys.exc_info()[0] is None:
            raise KeyboardInterrupt

    def preempted(self) -> None:
        """Handle a SIGTERM that a step in this process caught as if it had arrived here."""
        self._handle(signal.SIGTERM, None)

    def terminated(self) -> KeyboardInterrupt:
        """The exception to raise after a library handled SIGTERM itself."""
        self.status = 128 + signal.SIGTERM
        return self._begin_to_end()

    def leave(self) -> None:
        """Exit now if a signal interrupted work: a Ray that still starts aborts when torn down."""
        if self._ending:
            sys.stdout.flush()
            _end(self.status)

    def _handle(self, number: int, frame: Any) -> None:
        del frame
        self._count += 1
        self.status = 128 + number if self._count == 1 else self.status
        if self._count == 1 and self._stop is not None:
            self._stop()
            return
        if self._ending:
            _end(self.status, INTERRUPTED)
        raise self._begin_to_end()

    def _begin_to_end(self) -> KeyboardInterrupt:
        if self._alone:
            self._ending = True
            self._requests.put("end")
            # Errors from objects that are torn down halfway are noise.
            sys.unraisablehook = lambda _: None
        return KeyboardInterrupt()

    def _serve(self) -> None:
        if self._requests.get() == "over":
            return
        # Give the main thread this long to end by itself; another request ends the wait.
        with contextlib.suppress(queue.Empty):
            self._requests.get(timeout=END_SECONDS)
        _end(self.status, INTERRUPTED)


def _end(status: int, message: str = "") -> None:
    """Kill this process and its descendants at once."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), _SHOW_CURSOR)
        if message:
            os.write(sys.stderr.fileno(), f"{message}\n".encode())
    # Ray's agents outlive a killed driver by a minute.
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
    os._exit(status)


@functools.cache
def _ignore_at_exit() -> None:
    """Ignore both signals at exit, where a Ctrl-C would only print an interpreter stack trace."""
    for number in _SIGNALS:
        atexit.register(signal.signal, number, signal.SIG_IGN)
