"""The logs of an attempt's processes, written while they run: logging, stdout and stderr.

A log has one URL. On a local disk that is a file, written in place; on an object store it is a
directory of parts (`000001.txt`, ...), uploaded every `PART_SECONDS` or `PART_BYTES`, so that the
log of a killed process lacks only its last seconds. Of each `MERGED` parts one is made, named after
the first and the last (`000001-000064.txt`), and of each `MERGED` of those, so that the log of a
run of weeks has few objects. Readers ignore a part whose bytes a merged one has: one that is not
deleted yet, or never will be because its writer was killed, is in the log once.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.errors import PonenteError
from pipeline.execute.screen import Copies, Log, Screen
from pipeline.graph.module_names import NEIGHBOURS
from pipeline.store import storage
from pipeline.store.manifest import PROCESS_LOGS
from pipeline.store.parallel import concurrently

NAME = "log.txt"  # log of the process that executes the step
PART_SECONDS = 10.0
PART_BYTES = 64 * 1024
MERGED = 64
_MERGED_BYTES = 4 * 2**20
_LOOKS = 5  # a reader lists the parts again if some were merged since it listed them
_PART = re.compile(r"(\d+)(?:-(\d+))?\.txt")
_ENGINE = "ponente"
_SHOWN = "%(levelname)s %(name)s: %(message)s"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

logger = logging.getLogger(_ENGINE)


@contextlib.contextmanager
def capture(
    url: str,
    *,
    redirect: bool,
    packages: Iterable[str] = (),
    show: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[None]:
    """Send this process's log records, stdout and stderr to the log `url` while the block runs.

    That includes what C libraries and child processes write to descriptors 1 and 2.

    Args:
        url: URL of the log.
        redirect: send stdout and stderr only there; for a worker, not for a terminal.
        packages: loggers whose INFO records are kept, in addition to the engine's; warnings of all
            loggers are kept.
        show: called with "output" events for the user's terminal: the records of the user's own
            modules, and what a worker prints, or what came by the descriptors of another process.
    """
    with contextlib.ExitStack() as stack:
        if storage.is_local(url):
            path = storage.local_path(url)
            os.makedirs(os.path.dirname(path), exist_ok=True)
        else:
            path = stack.enter_context(Parts(url)).path
        log = stack.enter_context(Log(path))
        handler = logging.StreamHandler(log)
        handler.setFormatter(logging.Formatter(_FORMAT))
        stack.enter_context(_attached(handler, {_ENGINE, *packages}))
        screen = None
        if show is not None:
            screen = stack.enter_context(Screen(show, None if redirect else log.unseen))
            stack.enter_context(_attached(_of_users(screen, packages), set()))
        if redirect or screen is not None:
            stack.enter_context(_redirected(path, (1, 2) if redirect else _free()))
        stack.enter_context(_printed(log, screen, redirect))
        yield


class Tail:
    """Reads a log from its beginning, then the bytes appended since.

    Args:
        url: URL of the log.
        read: number of bytes to skip.

    Attributes:
        read: number of bytes that were read or skipped.
    """

    def __init__(self, url: str, read: int = 0) -> None:
        self._url, self.read = url, read

    def more(self) -> bytes:
        """The bytes appended since the last call; empty when there are none."""
        if not storage.is_local(self._url):
            return b"".join(self._uploaded())
        try:
            with storage.open_read(self._url) as file:
                file.seek(self.read)
                text = file.read()
        except FileNotFoundError:
            return b""
        self.read += len(text)
        return text

    def _uploaded(self) -> Iterator[bytes]:
        for _ in range(_LOOKS):
            wanted, start = [], 0
            for name, size in _parts(self._url):
                if start + size > self.read:
                    wanted.append((storage.join(self._url, name), max(self.read - start, 0)))
                start += size
            texts = concurrently(_part, (url for url, _ in wanted), self._url)
            for text, (_, skipped) in zip(texts, wanted, strict=True):
                if text is None:
                    break  # merged since it was listed
                self.read += len(text) - skipped
                yield text[skipped:]
            else:
                return


def _parts(url: str) -> list[tuple[str, int]]:
    """Names and sizes of the objects that a log consists of, in order."""
    found = []
    for name, size in storage.list_files(url):
        if match := _PART.fullmatch(name):
            found.append((int(match[1]), -int(match[2] or match[1]), name, size))
    kept, reached = [], 0
    for _, last, name, size in sorted(found):
        if -last > reached:
            kept.append((name, size))
            reached = -last
    return kept


def _part(url: str) -> bytes | None:
    try:
        return storage.read_bytes(url)
    except FileNotFoundError:
        return None


def processes(attempt: str) -> list[str]:
    """URLs of the logs in an attempt's directory: the step's own, then those of a gang."""
    names = storage.list_names(attempt)
    found = [storage.join(attempt, NAME)] if NAME in names else []
    if PROCESS_LOGS in names:
        directory = storage.join(attempt, PROCESS_LOGS)
        found += [storage.join(directory, name) for name in storage.list_names(directory)]
    return found


@dataclass(frozen=True)
class _Part:
    """An uploaded object: the numbers of the parts whose bytes it has, and where those are."""

    first: int
    last: int
    start: int
    end: int

    @property
    def name(self) -> str:
        last = f"-{self.last:06d}" if self.last > self.first else ""
        return f"{self.first:06d}{last}.txt"


class Parts:
    """Context that uploads a growing local file in parts, and deletes the file at its end.

    Args:
        url: directory of the parts.

    Attributes:
        path: the file.
    """

    def __init__(self, url: str) -> None:
        descriptor, self.path = tempfile.mkstemp(suffix=".log")
        os.close(descriptor)
        self._url = url
        self._uploaded: list[_Part] = []
        # The first part is uploaded at once: it says what has begun.
        self._sent, self._number, self._last = 0, 0, -PART_SECONDS
        self._over = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._follow, name="log-upload", daemon=True)

    def __enter__(self) -> Parts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        os.unlink(self.path)

    def _follow(self) -> None:
        while not self._over.wait(1.0):
            grown = os.path.getsize(self.path) - self._sent
            overdue = time.monotonic() - self._last >= PART_SECONDS
            if grown >= PART_BYTES or (grown and overdue):
                self._upload()
        self._upload()

    def _upload(self) -> None:
        self._last = time.monotonic()
        part = _Part(self._number + 1, self._number + 1, self._sent, os.path.getsize(self.path))
        if part.end == part.start:
            return
        try:
            self._write(part)
            self._number, self._sent = part.last, part.end
            self._merge()
        except (OSError, PonenteError) as error:
            # An upload that fails must not fail the step; the next part includes these bytes too.
            if not self._failed:
                logger.warning("%s: the log cannot be uploaded: %s", self._url, error)
            self._failed = True

    def _write(self, part: _Part) -> None:
        with open(self.path, "rb") as file:
            file.seek(part.start)
            text = file.read(part.end - part.start)
        storage.write_atomic(storage.join(self._url, part.name), text)
        self._uploaded.append(part)

    def _merge(self) -> None:
        """Replace the last `MERGED` objects of as many parts each by one."""
        while len(last := self._uploaded[-MERGED:]) == MERGED:
            whole = _Part(last[0].first, last[-1].last, last[0].start, last[-1].end)
            if len({p.last - p.first for p in last}) > 1 or whole.end - whole.start > _MERGED_BYTES:
                return
            self._write(whole)
            self._uploaded[-MERGED - 1 :] = [whole]
            fs, directory = storage.filesystem(self._url)
            fs.rm([f"{directory}/{part.name}" for part in last])


def _of_users(screen: Screen, packages: Iterable[str]) -> logging.Handler:
    """A handler that shows the records of packages other than the engine and its neighbours."""
    users = set(packages) - NEIGHBOURS
    handler = logging.StreamHandler(screen)
    handler.setFormatter(logging.Formatter(_SHOWN))
    handler.addFilter(lambda record: record.name.partition(".")[0] in users)
    return handler


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


@contextlib.contextmanager
def _attached(handler: logging.Handler, packages: set[str]) -> Iterator[None]:
    root = logging.getLogger()
    root.addHandler(handler)
    _Informative.enter(packages)
    try:
        yield
    finally:
        _Informative.leave(packages)
        root.removeHandler(handler)


class _Informative:
    """Sets loggers to INFO while an attempt needs it; counts users, as threads run attempts."""

    _lock = threading.Lock()
    _wanted: ClassVar[Counter[str]] = Counter()
    _levels: ClassVar[dict[str, int]] = {}

    @classmethod
    def enter(cls, packages: set[str]) -> None:
        with cls._lock:
            for name in packages:
                if not cls._wanted[name]:
                    cls._levels[name] = logging.getLogger(name).level
                    logging.getLogger(name).setLevel(logging.INFO)
                cls._wanted[name] += 1

    @classmethod
    def leave(cls, packages: set[str]) -> None:
        with cls._lock:
            for name in packages:
                cls._wanted[name] -= 1
                if not cls._wanted[name]:
                    logging.getLogger(name).setLevel(cls._levels.pop(name))


def _free() -> list[int]:
    """Descriptors that Python's stdout and stderr do not write to; a run's have others."""
    taken = set()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            taken.add(stream.fileno())
    return [descriptor for descriptor in (1, 2) if descriptor not in taken]


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
    """Flush the buffers of Python and of C."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
