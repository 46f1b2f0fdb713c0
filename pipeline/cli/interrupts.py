"""Ctrl-C and a plain `kill` during a run: once stops it cleanly, twice ends it at once.

A signal handler runs between any two bytecode instructions of the main thread, which may hold any
lock. So it only sets flags and raises; a separate thread prints, and ends the process if the main
thread does not.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from pipeline.cli.context import say

END_SECONDS = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"
_STOPPING = (
    "stopping: what is in flight is finished first, and training saves a checkpoint; "
    "Ctrl-C again ends it at once"
)
INTERRUPTED = "interrupted; finished steps are kept, run it again to resume"


class Interrupts:
    """Context in which both signals stop the run.

    Attributes:
        status: the process's exit status after a signal.
    """

    def __init__(self) -> None:
        self.status = 130
        self._count = 0
        self._ending = False
        self._stop: Callable[[], None] | None = None
        self._previous: dict[int, Any] = {}
        # SimpleQueue.put is reentrant, so a signal handler may call it.
        self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="interrupts", daemon=True)

    def __enter__(self) -> Interrupts:
        self._thread.start()
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if not self._ending:
            self._requests.put("over")
        _ignore_at_exit()

    def install(self) -> None:
        """Install the handlers; call it again after a library replaced them (Ray does at start)."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                previous = signal.signal(number, self._handle)
                self._previous.setdefault(number, previous)
            # A closed ssh session must not end the run; Ray's processes inherit SIG_IGN.
            previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
            self._previous.setdefault(signal.SIGHUP, previous)

    @contextlib.contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """While the block runs, the first signal calls `stop` instead of ending the run."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

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
        self._begin_to_end()
        return KeyboardInterrupt()

    def leave(self) -> None:
        """Exit now if a signal interrupted work halfway, without tearing that work down.

        A Ray that is still starting, for example, aborts the interpreter when it is torn down.
        """
        if self._ending:
            sys.stdout.flush()
            _end(self.status)

    def _handle(self, number: int, frame: Any) -> None:
        del frame
        self._count += 1
        if self._count == 1:
            self.status = 128 + number
            if self._stop is not None:
                self._requests.put("stopping")
                self._stop()
                return
        if self._ending:
            _end(self.status, INTERRUPTED)
        self._begin_to_end()
        raise KeyboardInterrupt

    def _begin_to_end(self) -> None:
        self._ending = True
        self._requests.put("end")
        # Errors from objects that are torn down halfway are noise.
        sys.unraisablehook = lambda _: None

    def _serve(self) -> None:
        while (request := self._requests.get()) != "over":
            if request == "stopping":
                say(_STOPPING, error=True)
            else:
                # Give the main thread this long to end by itself; another request ends the wait.
                with contextlib.suppress(queue.Empty):
                    self._requests.get(timeout=END_SECONDS)
                _end(self.status, INTERRUPTED)


def _end(status: int, message: str = "") -> None:
    """Kill this process and its descendants at once."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR)
        if message:
            os.write(2, f"{message}\n".encode())
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
