"""Ctrl-C and a plain `kill` during a run: once stops it cleanly, twice ends it at once.

A handler runs between any two instructions of the main thread, which may hold any lock. So it only
sets flags and raises; a thread of its own prints, and ends the process if the main thread does
not.
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
        status: what the process is to exit with after a signal.
    """

    def __init__(self) -> None:
        self.status = 130
        self._count = 0
        self._ending = False
        self._stop: Callable[[], None] | None = None
        self._previous: dict[int, Any] = {}
        # Its `put` is the one way to another thread that a signal handler may take.
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._attend, name="interrupts", daemon=True)

    def __enter__(self) -> Interrupts:
        self._thread.start()
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if not self._ending:
            self._words.put("over")
        _ignore_at_exit()

    def install(self) -> None:
        """Take the signals; again after a library took them (Ray does when it starts)."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                previous = signal.signal(number, self._handle)
                self._previous.setdefault(number, previous)
            # A dead ssh ends the screen, not the run; Ray's processes inherit that it is ignored.
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
        """Let nothing but a second signal cut this block short; a first one counts after it."""
        count = self._count
        with self.stopping(lambda: None):
            yield
        if self._count > count and sys.exc_info()[0] is None:
            raise KeyboardInterrupt

    def preempted(self) -> None:
        """Count a SIGTERM that a step in this process took, as one that came here."""
        self._handle(signal.SIGTERM, None)

    def terminated(self) -> KeyboardInterrupt:
        """What to raise when a library answered SIGTERM its own way."""
        self.status = 128 + signal.SIGTERM
        self._begin_to_end()
        return KeyboardInterrupt()

    def leave(self) -> None:
        """Where a signal ended the run in the middle of something: do not tear that down.

        A Ray that was still starting, for one, aborts the interpreter on its way out.
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
                self._words.put("stopping")
                self._stop()
                return
        if self._ending:
            _end(self.status, INTERRUPTED)
        self._begin_to_end()
        raise KeyboardInterrupt

    def _begin_to_end(self) -> None:
        self._ending = True
        self._words.put("end")
        # Errors of what is torn down halfway are of no use to anyone.
        sys.unraisablehook = lambda _: None

    def _attend(self) -> None:
        while (word := self._words.get()) != "over":
            if word == "stopping":
                say(_STOPPING, error=True)
            else:
                # Nothing is put after it: this waits.
                with contextlib.suppress(queue.Empty):
                    self._words.get(timeout=END_SECONDS)
                _end(self.status, INTERRUPTED)


def _end(status: int, message: str = "") -> None:
    """End this process and all it has started, now."""
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
    """Once everything is printed, a Ctrl-C would only show a stack trace of the interpreter."""
    for number in _SIGNALS:
        atexit.register(signal.signal, number, signal.SIG_IGN)
