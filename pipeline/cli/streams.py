"""Standard output and error that may go away under a run without failing it.

A pipe whose reader has ended, a terminal that hung up and a full disk behind a redirection refuse
writes. The first refusal points the stream's file descriptor at /dev/null: what is buffered, what
libraries write and the interpreter's own last flush then succeed.
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
        """Write `text`, or drop it when the stream is gone."""
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Flush, or drop what is buffered when the stream is gone."""
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
        # Flushed here, or the interpreter's last flush would find the closed pipe.
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
