"""Python's files for Arrow to read, so that its threads need no Python when a process ends.

Arrow reads ahead in threads of its own. One of them may be the last to hold a file or a block that
was read from it, some time after whoever asked has the rows. To let go of either it needs the
interpreter, and where that is ending it aborts the process, whose work is done
(https://github.com/apache/arrow/issues/34314).
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

_MOST_SECONDS = 2.0  # a block that is still held then has an owner who keeps it
_blocks: set[weakref.ref[memoryview]] = set()


@contextmanager
def arrow_file(handle: IO[bytes] | io.RawIOBase) -> Iterator[pa.NativeFile]:
    """A file of Python's for Arrow to read, which it has let go of, and closed, when this ends.

    Blocks of it may be held for longer; the process does not end before they are let go of.
    """
    source = pa.PythonFile(_Counted(handle), mode="r")
    try:
        yield source
    finally:
        source.close()


class _Counted:
    """What Arrow needs of a file; the blocks it gives are counted until they are released."""

    def __init__(self, handle: IO[bytes] | io.RawIOBase) -> None:
        self._handle = handle

    def read(self, size: int = -1) -> memoryview:
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
    """Wait for the threads that hold a block; there is nothing to wait for but their turn."""
    end = time.monotonic() + _MOST_SECONDS
    while _blocks and time.monotonic() < end:
        time.sleep(0.001)
