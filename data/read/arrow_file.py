"""Wraps Python files for Arrow, and tells its errors of damaged files from those of a store.

At exit it waits until Arrow has released the files' buffers.

Arrow prefetches in its own threads. Such a thread may hold the last reference to a file or to a
block read from it, some time after the caller has the rows. Releasing it needs the interpreter; if
that is shutting down, the thread aborts the process (https://github.com/apache/arrow/issues/34314).
"""

from __future__ import annotations

import atexit
import io
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pyarrow as pa
from fsspec.spec import AbstractBufferedFile

from data.read.retry import redact
from pipeline.errors import InputError

_MOST_SECONDS = 2.0  # a block held for longer belongs to Python code, not to a thread of Arrow
_blocks: set[weakref.ref[memoryview]] = set()


@contextmanager
def arrow_file(handle: IO[bytes] | AbstractBufferedFile) -> Iterator[pa.NativeFile]:
    """A Python file as an Arrow file, closed and released by Arrow when the context ends."""
    source = pa.PythonFile(_Counted(handle), mode="r")
    try:
        yield source
    finally:
        source.close()


@contextmanager
def whole(url: str, kind: str) -> Iterator[None]:
    """Errors that mean a corrupt file, as an `InputError` that expected a whole one of a kind."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if not is_corrupt(error):
            raise
        raise unsound(url, kind, one_line(error)) from error


def unsound(url: str, kind: str, found: str) -> InputError:
    return InputError(
        f"{redact(url)}: expected a whole {kind}, found {redact(found)}; "
        "fetch the file again or leave it out of the source"
    )


def is_corrupt(error: Exception) -> bool:
    """Whether `error` means that an Arrow or Parquet file is corrupt or missing.

    Arrow reports corrupt data as its own exceptions or as an `OSError` without an error number; an
    error of the disk or network has a number or another class.
    """
    if isinstance(error, pa.ArrowException | FileNotFoundError | UnicodeDecodeError):
        return True
    return type(error) is OSError and error.errno is None


def one_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


class _Counted:
    """The file interface that Arrow needs; tracks the blocks it returns until their release."""

    def __init__(self, handle: IO[bytes] | AbstractBufferedFile) -> None:
        self._handle = handle
        self._size = handle.seek(0, io.SEEK_END)
        handle.seek(0)

    def read(self, size: int = -1) -> memoryview:
        # A damaged length can ask for more than there is memory.
        size = self._size if size < 0 else min(size, self._size)
        block = memoryview(self._handle.read(size) or b"")
        _blocks.add(weakref.ref(block, _blocks.discard))
        return block

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._handle.seek(offset, whence)

    def tell(self) -> int:
        return self._handle.tell()

    def close(self) -> None:
        self._handle.close()

    @property
    def closed(self) -> bool:
        return self._handle.closed

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


@atexit.register
def _let_go() -> None:
    """Wait until Arrow's threads have released all blocks; each only needs to be scheduled."""
    end = time.monotonic() + _MOST_SECONDS
    while _blocks and time.monotonic() < end:
        time.sleep(0.001)
