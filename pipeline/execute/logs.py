"""The logs of an attempt's processes, written while they run: logging, stdout and stderr."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import faulthandler
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pipeline import events
from pipeline.events import Emit
from pipeline.graph.module_names import NEIGHBOURS
from pipeline.store import storage
from pipeline.store.append import Appender
from pipeline.store.manifest import PROCESS_LOGS

NAME = "log.txt"  # log of the process that executes the step
_ENGINE = "ponente"
_FORMAT = "%(levelname)s %(name)s: %(message)s"


@contextlib.contextmanager
def capture(
    url: str,
    *,
    redirect: bool,
    packages: Iterable[str] = (),
    show: Emit | None = None,
) -> Iterator[None]:
    """Send this process's log records, stdout and stderr to the log `url` while the block runs.

    That includes what C libraries and child processes write to descriptors 1 and 2.
    """
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(Appender(url)).path
        log = stack.enter_context(Log(path))
        handler = logging.StreamHandler(log)
        handler.setFormatter(logging.Formatter(f"%(asctime)s {_FORMAT}"))
        stack.enter_context(_attached(handler, {_ENGINE, *packages}))
        screen = None
        if show is not None:
            screen = stack.enter_context(Screen(show, None if redirect else log.unseen))
            # Of the user's own packages, not of the engine and its neighbours.
            users, shown = set(packages) - NEIGHBOURS, logging.StreamHandler(screen)
            shown.setFormatter(logging.Formatter(_FORMAT))
            shown.addFilter(lambda record: record.name.partition(".")[0] in users)
            stack.enter_context(_attached(shown, set()))
        if redirect or screen is not None:
            stack.enter_context(_redirected(path, (1, 2) if redirect else _free()))
        stack.enter_context(_printed(log, screen, redirect))
        yield


def processes(attempt: str) -> list[str]:
    """URLs of the logs in an attempt's directory: the step's own, then those of a gang."""
    names = storage.list_names(attempt)
    found = [storage.join(attempt, NAME)] if NAME in names else []
    if PROCESS_LOGS in names:
        directory = storage.join(attempt, PROCESS_LOGS)
        found += [storage.join(directory, name) for name in storage.list_names(directory)]
    return found


@contextlib.contextmanager
def _printed(file: Log, screen: Screen | None, redirect: bool) -> Iterator[None]:
    """Copy what Python prints to the file, and from a worker to the screen."""
    before = sys.stdout, sys.stderr
    others = () if screen is None else (screen,)
    copies = [Copies(file, *((file, *others) if redirect else (stream, file))) for stream in before]
    sys.stdout, sys.stderr = copies
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for copy, stream in zip(copies, before, strict=True):
            copy.end(stream)


_informative: Counter[str] = Counter()  # loggers at INFO: how many attempts want it
_levels: dict[str, int] = {}  # before


@contextlib.contextmanager
def _attached(handler: logging.Handler, packages: set[str]) -> Iterator[None]:
    """Add a handler to the root logger; these loggers pass INFO records meanwhile."""
    logging.getLogger().addHandler(handler)
    for name in packages - (+_informative).keys():
        _levels[name] = logging.getLogger(name).level
        logging.getLogger(name).setLevel(logging.INFO)
    _informative.update(packages)
    try:
        yield
    finally:
        _informative.subtract(packages)
        for name in [name for name in packages if not _informative[name]]:
            logging.getLogger(name).setLevel(_levels.pop(name))
        logging.getLogger().removeHandler(handler)


def _free() -> set[int]:
    """Descriptors that Python's stdout and stderr do not write to; a run's have others."""
    free = {1, 2}
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            free.discard(stream.fileno())
    return free


_redirecting = threading.Lock()  # by one attempt at a time: descriptors are the process's


@contextlib.contextmanager
def _redirected(path: str, descriptors: Iterable[int]) -> Iterator[None]:
    if not _redirecting.acquire(blocking=False):
        yield
        return
    saved: dict[int, int] = {}
    crash = False
    _flush()
    try:
        target = os.open(path, os.O_WRONLY | os.O_APPEND)
        for descriptor in descriptors:
            saved[descriptor] = os.dup(descriptor)
            os.dup2(target, descriptor)
        os.close(target)
        if crash := 2 in saved and not faulthandler.is_enabled():
            faulthandler.enable(saved[2])  # the library's own last words are in the log
        yield
    finally:
        _flush()
        if crash:
            faulthandler.disable()
        for descriptor, copy in saved.items():
            os.dup2(copy, descriptor)
            os.close(copy)
        _redirecting.release()


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)


SECONDS = 1.0
LINES = 20  # shown per `SECONDS`; the log has all


class Screen:
    """A text stream that reports its lines as "output" events, from a thread."""

    def __init__(self, show: Emit, more: Callable[[], str] | None = None) -> None:
        self._show, self._more = show, more
        self._pieces: list[str] = []
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="screen", daemon=True)

    def __enter__(self) -> Screen:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._send("\n")

    def write(self, text: str) -> int:
        """Show the text with the next lines; of a line that is written over, its last version."""
        with self._lock:
            self._pieces.append(text)
        return len(text)

    def _follow(self) -> None:
        while not self._over.wait(SECONDS):
            self._send()

    def _send(self, last: str = "") -> None:
        with contextlib.suppress(OSError):
            self.write(self._more() if self._more is not None else "")
        self.write(last)
        with self._lock:
            text, end, rest = "".join(self._pieces).rpartition("\n")
            self._pieces = [rest if end else rest.rpartition("\r")[2]]
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
        lines = [line for line in lines if line.strip()]
        if len(lines) > LINES:
            lines[LINES:] = [f"... {len(lines) - LINES} more lines are in the log"]
        # A display that fails must not fail the step.
        with contextlib.suppress(Exception):
            if lines:
                self._show(events.Output("\n".join(lines)))


class Log:
    """A file as a text stream that other processes, and C libraries, append to as well.

    Whatever they do, no writer waits for a reader, and the text is in the file at once.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "ab+", 0)  # noqa: SIM115 - closed by `__exit__`
        # Reentrant, as a signal handler may print.
        self._lock, self._mine = threading.RLock(), list[tuple[int, int]]()
        self._seen, self._process = os.fstat(self._file.fileno()).st_size, os.getpid()
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "replace")
        if self.forked:  # its copy of the lock may never be free
            self._file.write(data)
            return len(text)
        with self._lock:
            self._file.write(data)
            end = self._file.tell()
            self._mine.append((end - len(data), end))
        return len(text)

    @property
    def forked(self) -> bool:
        """Whether this is a fork of the process that opened it, which shows what a fork prints."""
        return os.getpid() != self._process

    def flush(self) -> None: ...

    def unseen(self) -> str:
        """What others have appended since the last call."""
        with self._lock:
            end, mine = os.fstat(self._file.fileno()).st_size, self._mine
            self._mine = []
        pieces = []
        for start, stop in [*mine, (end, end)]:
            pieces.append(os.pread(self._file.fileno(), start - self._seen, self._seen))
            self._seen = stop
        return self._decode(b"".join(pieces))


class Copies:
    """A text stream whose text goes to others as well, which may fail."""

    def __init__(self, log: Log, stream: Any, *others: Any) -> None:
        self._log, self._stream, self._others = log, stream, others
        self._unfinished = False

    def write(self, text: str) -> int:
        if self._log.forked:
            return self._log.write(text)
        for other in self._others:
            with contextlib.suppress(OSError):
                other.write(text)
        self._unfinished = not text.endswith("\n") if text else self._unfinished
        return self._stream.write(text)

    def break_line(self) -> None:
        """End a line that was begun, for text of somebody else."""
        if self._unfinished:
            self._stream.write("\n")
        self._unfinished = False

    def end(self, stream: Any) -> None:
        """From now on stand for `stream` alone: somebody may keep this object."""
        if self._unfinished:
            self.write("\n")
        self._stream, self._others = stream, ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
