"""The logs of an attempt's processes, written while they run: logging, stdout and stderr.

A log has one URL. On a local disk that is a file, written in place; on an object store it is a
directory of parts (`000001.txt`, ...), uploaded every `PART_SECONDS` or `PART_BYTES`, so that no
byte is sent twice and the log of a killed process lacks only its last seconds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import ClassVar

from pipeline.errors import PonenteError
from pipeline.store import storage
from pipeline.store.manifest import PROCESS_LOGS

NAME = "log.txt"  # log of the process that executes the step
PART_SECONDS = 10.0
PART_BYTES = 64 * 1024
_ENGINE = "ponente"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

logger = logging.getLogger(_ENGINE)


@contextlib.contextmanager
def capture(url: str, *, redirect: bool, packages: Iterable[str] = ()) -> Iterator[None]:
    """Send this process's log records to the log `url` while the block runs.

    Args:
        url: URL of the log.
        redirect: also send file descriptors 1 and 2 there; for a worker, not for a terminal.
        packages: loggers whose INFO records are kept, in addition to the engine's; warnings of all
            loggers are kept.
    """
    local = storage.is_local(url)
    path = storage.local_path(url) if local else tempfile.mkstemp(suffix=".log")[1]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with contextlib.ExitStack() as stack:
        if not local:
            stack.enter_context(Parts(path, url))
        file = stack.enter_context(open(path, "a", buffering=1))
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter(_FORMAT))
        stack.enter_context(_attached(handler, {_ENGINE, *packages}))
        if redirect:
            stack.enter_context(_redirected(file.fileno()))
        yield


class Tail:
    """Reads a log from its beginning, then the bytes appended since.

    Args:
        url: URL of the log.
    """

    def __init__(self, url: str) -> None:
        self._url, self._read = url, 0

    def more(self) -> bytes:
        """The bytes appended since the last call; empty when there are none."""
        if not storage.is_local(self._url):
            names = storage.list_names(self._url)[self._read :]
            self._read += len(names)
            return b"".join(storage.read_bytes(storage.join(self._url, n)) for n in names)
        try:
            with storage.open_read(self._url) as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return b""
        self._read += len(text)
        return text


def processes(attempt: str) -> list[str]:
    """URLs of the logs in an attempt's directory: the step's own, then those of a gang."""
    names = storage.list_names(attempt)
    found = [storage.join(attempt, NAME)] if NAME in names else []
    if PROCESS_LOGS in names:
        directory = storage.join(attempt, PROCESS_LOGS)
        found += [storage.join(directory, name) for name in storage.list_names(directory)]
    return found


class Parts:
    """Context that uploads a growing file in parts, and deletes the file at its end.

    Args:
        path: the file.
        url: directory of the parts.
    """

    def __init__(self, path: str, url: str) -> None:
        self.path, self._url = path, url
        self._sent, self._number, self._last = 0, 0, time.monotonic()
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
        with open(self.path, "rb") as file:
            file.seek(self._sent)
            text = file.read()
        if not text:
            return
        try:
            storage.write_atomic(storage.join(self._url, f"{self._number + 1:06d}.txt"), text)
        except (OSError, PonenteError) as error:
            # An upload that fails must not fail the step; the next part includes these bytes too.
            if not self._failed:
                logger.warning("%s: the log cannot be uploaded: %s", self._url, error)
            self._failed = True
        else:
            self._number, self._sent = self._number + 1, self._sent + len(text)


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


@contextlib.contextmanager
def _redirected(target: int) -> Iterator[None]:
    sys.stdout.flush()
    sys.stderr.flush()
    saved = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    try:
        for descriptor in saved:
            os.dup2(target, descriptor)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in saved.items():
            os.dup2(copy, descriptor)
            os.close(copy)
