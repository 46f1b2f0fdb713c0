"""Files of this machine's disks: what `storage.py` does for a path that is not a URL.

A disk can fail for a moment (a network file system does), so every operation is retried. Only a
missing or existing file is an answer; anything else is never taken for one, since a directory that
could not be listed is not an empty directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from typing import IO, TypeVar

from pipeline.errors import InputError
from pipeline.store import retry

T = TypeVar("T")
_POLICY = retry.Policy(seconds=60.0, first=0.1, attempts=3)
_LOCK_SECONDS = 20.0
_LOCK_PAUSE_SECONDS = 0.01
# Not failures of the store but its answers, which callers act on.
_ANSWERS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


def with_retries(path: str, action: Callable[[], T]) -> T:
    """What the action returns, retried after errors of the disk.

    Raises:
        StoreUnavailable: when it still fails, naming `path`.
    """
    attempts = retry.Retry(path, _POLICY)
    while True:
        try:
            return action()
        except _ANSWERS:
            raise
        except OSError as error:
            pause = attempts.pause(error, str(error))
        attempts.sleep(pause)


def size(path: str) -> int | None:
    """Size in bytes of what is at `path`; None when nothing is."""
    try:
        return with_retries(path, lambda: os.stat(path).st_size)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read(path: str) -> bytes:
    """The file's content. Raises `FileNotFoundError` when there is none."""

    def once() -> bytes:
        with open(path, "rb") as file:
            return file.read()

    return with_retries(path, once)


def open_write(path: str) -> IO[bytes]:
    """Open a file for writing, in a directory that is made if need be."""

    def once() -> IO[bytes]:
        make_directory(os.path.dirname(path))
        return open(path, "wb")

    return with_retries(path, once)


def make_directory(path: str) -> None:
    """Make a directory and those above it."""
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError:
        # Also raised for a directory that could not be listed for a moment.
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise NotADirectoryError(f"{path}: expected a directory, found a file") from None


def create(path: str, data: bytes, durable: bool) -> bool:
    """A hard link of a finished file: there whole or not at all; False when `path` existed."""
    tries: list[str] = []

    def once() -> bool:
        tries.append(path)
        with _temporary(path, data, durable) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
        return True

    # A disk that reported a failure may have done it first: then what is there is ours.
    return with_retries(path, once) or (len(tries) > 1 and read(path) == data)


def replace(path: str, data: bytes, durable: bool) -> None:
    """Put a finished file in the place of the one at `path`."""

    def once() -> None:
        with _temporary(path, data, durable) as temporary:
            os.replace(temporary, path)

    with_retries(path, once)


def replace_if(path: str, data: bytes | None, version: str) -> bool:
    """Replace the file, or delete it (None), if the SHA-256 of its content is `version`."""
    tries: list[str] = []

    def once() -> bool:
        tries.append(path)
        with _locked(os.path.dirname(path)):
            try:
                with open(path, "rb") as file:
                    found = file.read()
            except FileNotFoundError:
                return len(tries) > 1 and data is None
            if hashlib.sha256(found).hexdigest() != version:
                # A disk that reported a failure may have done it first.
                return len(tries) > 1 and found == data
            if data is None:
                os.unlink(path)
                return True
            with _temporary(path, data, durable=True) as temporary:
                os.replace(temporary, path)
            return True

    try:
        return with_retries(path, once)
    except FileNotFoundError:
        return False  # the directory is gone


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """The lock on conditional writes in a directory; held for the time of one comparison.

    Raises:
        TimeoutError: when it is held for `_LOCK_SECONDS`, as by a process that was stopped.
    """
    name, deadline = os.path.join(directory, ".lock"), time.monotonic() + _LOCK_SECONDS
    while True:
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if _taken(file) and _same_file(file, name):
                yield
                return
        finally:
            os.close(file)  # releases the lock
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name}: locked for {_LOCK_SECONDS:.0f} s by another process")
        time.sleep(_LOCK_PAUSE_SECONDS)


def _taken(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same_file(file: int, name: str) -> bool:
    """Whether the open file is still the one of that name, and not one that was deleted."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(name))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _temporary(path: str, data: bytes, durable: bool) -> Iterator[str]:
    """A finished file of this content beside `path`, gone at the end unless it was renamed."""
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
            # Litter, at worst; what was to be done is done, or its error is on its way.
            continue
        return


def list_names(path: str) -> list[str]:
    """Names directly under a directory; empty when there is no such directory."""
    try:
        return with_retries(path, lambda: os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def walk(path: str) -> dict[str, int]:
    """Size in bytes of every file under `path`, by its own path.

    Raises:
        InputError: for a symbolic link, a pipe or a device.
    """
    return with_retries(path, lambda: _walk(path))


def inventory(path: str) -> dict[str, tuple[int, float | None]]:
    """Bytes and Unix time of the last write of all files, links and empty directories below."""
    found: dict[str, tuple[int, float | None]] = {}
    for directory, inner, names in os.walk(path):
        links = [name for name in inner if os.path.islink(os.path.join(directory, name))]
        for name in (*names, *links):
            with contextlib.suppress(FileNotFoundError):
                state = os.lstat(os.path.join(directory, name))
                found[os.path.join(directory, name)] = (state.st_size, state.st_mtime)
        if not inner and not names and directory != path:
            found[directory] = (0, None)
    return found


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
                    f"{directory}/{name}: expected a file, found a symbolic link or something else "
                    "that is none; an output's files must be in its own directory"
                )
    return found


def remove(path: str) -> None:
    """Delete a file, or a directory with all that is in it; not being there is fine."""

    def once() -> None:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    with contextlib.suppress(FileNotFoundError):
        with_retries(path, once)


def check_writable(directory: str, name: str) -> None:
    """Write and delete a file called `name`. Raises `InputError` saying why it cannot be."""
    try:
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, name)
        with open(path, "xb") as file:
            file.write(b"ponente")
        os.unlink(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{directory}: expected a directory, found a file on the way") from error
    except OSError as error:
        raise InputError(
            f"{directory}: cannot be written ({error.strerror}); choose another prefix or "
            "correct its permissions"
        ) from error
