"""Let a run continue when stdout or stderr is lost.

Writes fail when the reader of a pipe has ended, the terminal hung up or the disk behind a
redirection is full. The first failed write redirects the stream's file descriptor to /dev/null, so
that buffered text, writes by libraries and the interpreter's last flush succeed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class _Stream:
    """A text stream whose writes never raise."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`, or drop it if the stream is lost."""
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Flush, or drop the buffer if the stream is lost."""
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def survive_closed_streams() -> Iterator[None]:
    """While the block runs, losing stdout or stderr raises nothing."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Stream(before[0]), _Stream(before[1])
    try:
        yield
    finally:
        # Flush here: the interpreter's last flush would fail on the closed pipe.
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
