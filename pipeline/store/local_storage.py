"""Files on this machine's disks.

Every operation is retried, as a network file system can fail for a moment. Only the errors about a
missing or existing file are answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from typing import IO, TypeVar

from pipeline.errors import InputError
from pipeline.store import retry

T = TypeVar("T")
TEMPORARY = re.compile(r".*\.[0-9a-f]{32}\.tmp")  # of a file that is being written
ABANDONED_SECONDS = 86_400.0  # from which on a temporary file is one of a killed writer
_POLICY = retry.Policy(seconds=60.0, first=0.1, attempts=3)
_LOCK_SECONDS = 20.0
_LOCK_PAUSE_SECONDS = 0.01
# Answers that callers act on, and no failures of the disk.
_ANSWERS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux's alone
_HERE, _NO_REPLACE = -100, 1  # AT_FDCWD and RENAME_NOREPLACE


def with_retries(path: str, action: Callable[[], T]) -> T:
    """The result of `action`; `StoreUnavailable`, which names `path`, when it keeps failing."""
    attempts = retry.Retry(path, _POLICY)
    while True:
        try:
            return action()
        except _ANSWERS:
            raise
        except OSError as error:
            pause = attempts.pause(error, str(error))
        attempts.sleep(pause)


class Disk:
    """The operations of `storage` on the file or directory at an absolute path."""

    def __init__(self, path: str) -> None:
        self.path = path

    def exists(self) -> bool:
        return self.size() is not None

    def size(self) -> int | None:
        try:
            return with_retries(self.path, lambda: os.stat(self.path).st_size)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def modified(self) -> float | None:
        try:
            return os.stat(self.path).st_mtime
        except FileNotFoundError:
            return None

    def read(self) -> bytes:
        return with_retries(self.path, lambda: _read(self.path))

    def open_read(self) -> IO[bytes]:
        return with_retries(self.path, lambda: open(self.path, "rb"))

    def open_write(self) -> IO[bytes]:
        def once() -> IO[bytes]:
            make_directory(os.path.dirname(self.path))
            return open(self.path, "wb")

        return with_retries(self.path, once)

    def create(self, data: bytes, durable: bool) -> bool:
        """By `os.link` of a finished temporary file: unlike a rename, it fails if `path` exists."""
        tries: list[str] = []

        def once() -> bool:
            tries.append(self.path)
            with _temporary(self.path, data, durable) as temporary:
                try:
                    os.link(temporary, self.path)
                except FileExistsError:
                    return False
                except OSError as error:
                    tries.append(self.path)
                    return _rename_to_new(temporary, self.path, error)
            return True

        # An operation that failed may still have taken effect: after a retry, a file with this
        # content is our own.
        return with_retries(self.path, once) or (len(tries) > 1 and self.read() == data)

    def read_versioned(self) -> tuple[bytes, str]:
        data = self.read()
        return data, hashlib.sha256(data).hexdigest()

    def replace(self, data: bytes, durable: bool) -> None:
        def once() -> None:
            with _temporary(self.path, data, durable) as temporary:
                os.replace(temporary, self.path)

        with_retries(self.path, once)

    def replace_if(self, data: bytes | None, version: str) -> bool:
        tries: list[str] = []

        def once() -> bool:
            tries.append(self.path)
            with _locked(os.path.dirname(self.path)):
                try:
                    found = _read(self.path)
                except FileNotFoundError:
                    return len(tries) > 1 and data is None
                if hashlib.sha256(found).hexdigest() != version:
                    # As in `create`: a try that failed may still have taken effect.
                    return len(tries) > 1 and found == data
                if data is None:
                    os.unlink(self.path)
                    return True
                with _temporary(self.path, data, durable=True) as temporary:
                    os.replace(temporary, self.path)
                return True

        try:
            return with_retries(self.path, once)
        except FileNotFoundError:
            return False  # the directory is gone

    def list_names(self) -> list[str]:
        try:
            names = with_retries(self.path, lambda: os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [name for name in names if not TEMPORARY.fullmatch(name)]

    def entries(self) -> dict[str, float]:
        found = {}
        for name in self.list_names():
            with contextlib.suppress(FileNotFoundError):
                found[name] = os.stat(os.path.join(self.path, name)).st_mtime
        return found

    def files(self) -> dict[str, int]:
        # Not by fsspec, which skips what it cannot list: a shard would lose files unnoticed.
        return with_retries(self.path, lambda: _walk(self.path))

    def inventory(self) -> dict[str, tuple[int, float | None]]:
        """Leaves out the temporary files of writers that may be alive."""
        found: dict[str, tuple[int, float | None]] = {}
        since = time.time() - ABANDONED_SECONDS
        for directory, inner, names in os.walk(self.path):
            links = [name for name in inner if os.path.islink(os.path.join(directory, name))]
            for name in (*names, *links):
                with contextlib.suppress(FileNotFoundError):
                    state = os.lstat(os.path.join(directory, name))
                    if TEMPORARY.fullmatch(name) and state.st_mtime > since:
                        continue
                    found[os.path.join(directory, name)] = (state.st_size, state.st_mtime)
            if not inner and not names and directory != self.path:
                found[directory] = (0, None)
        return found

    def remove(self) -> None:
        def once() -> None:
            if stat.S_ISDIR(os.lstat(self.path).st_mode):
                shutil.rmtree(self.path)
            else:
                os.unlink(self.path)

        with contextlib.suppress(FileNotFoundError):
            with_retries(self.path, once)


def make_directory(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError:
        # `makedirs` also raises it for an existing directory whose `stat` failed for a moment.
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise NotADirectoryError(f"{path}: expected a directory, found a file") from None


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _rename_to_new(source: str, path: str, refused: OSError) -> bool:
    names = os.fsencode(source), os.fsencode(path)
    if _renameat2 is None:
        raise refused
    if not _renameat2(_HERE, names[0], _HERE, names[1], _NO_REPLACE):
        return True
    if ctypes.get_errno() == errno.EEXIST:
        return False
    raise refused


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """The lock on conditional writes in a directory, held for one comparison and write."""
    name, deadline = os.path.join(directory, ".lock"), time.monotonic() + _LOCK_SECONDS
    while True:
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if _held(file, name):
                yield
                return
        finally:
            os.close(file)  # releases the lock
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name}: locked for {_LOCK_SECONDS:.0f} s by another process")
        time.sleep(_LOCK_PAUSE_SECONDS)


def _held(file: int, name: str) -> bool:
    # A lock on a file that has lost its name excludes no process.
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file), os.stat(name))
    except (BlockingIOError, FileNotFoundError):
        return False


@contextlib.contextmanager
def _temporary(path: str, data: bytes, durable: bool) -> Iterator[str]:
    """A finished temporary file in the directory of `path`; deleted at the end unless renamed."""
    name = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        try:
            _write(name, data, durable)
        except FileNotFoundError:
            make_directory(os.path.dirname(path))
            _write(name, data, durable)
        yield name
    finally:
        _unlink_best_effort(name)


def _write(name: str, data: bytes, durable: bool) -> None:
    with open(name, "wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def _unlink_best_effort(name: str) -> None:
    for _ in range(2):
        try:
            os.unlink(name)
        except FileNotFoundError:
            return
        except OSError:
            continue  # at worst the file stays; the operation itself has succeeded or raised
        return


def _walk(path: str) -> dict[str, int]:
    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    found: dict[str, int] = {}
    try:
        top = os.lstat(path)
    except FileNotFoundError:
        return found
    if stat.S_ISREG(top.st_mode):
        return {path: top.st_size}
    if stat.S_ISLNK(top.st_mode):
        raise InputError(f"{path}: a symbolic link; an output's files must be in its own directory")
    for directory, inner, names in os.walk(path, onerror=refuse):
        for name in (*inner, *names):
            status = os.lstat(os.path.join(directory, name))
            if stat.S_ISREG(status.st_mode):
                found[os.path.join(directory, name)] = status.st_size
            elif not stat.S_ISDIR(status.st_mode):
                raise InputError(
                    f"{directory}/{name}: expected a regular file, found a symbolic link, a pipe "
                    "or a device; an output's files must be in its own directory"
                )
    return found
