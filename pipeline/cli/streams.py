"""Let a command continue on any screen: without UTF-8, closed at its start, or lost on the way.

The first failed write redirects the stream's descriptor to /dev/null, so that buffered text, writes
by libraries and the interpreter's last flush succeed. Descriptors 1 and 2 are left to a step's
child processes and C libraries, whose output goes to the step's log.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class _Stream:
    """A text stream that writes "?" for characters that the screen lacks."""

    def __init__(self, stream: Any, number: int, lasting: bool) -> None:
        self._given = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115
        self._stream = self._given
        self._lost: tuple[type[OSError], ...] = (OSError,) if lasting else ()
        with contextlib.suppress(AttributeError, OSError, ValueError):
            if lasting and stream.fileno() == number:
                stream.flush()
                how = "w", 1 if stream.line_buffering else -1, stream.encoding, stream.errors
                self._stream = open(os.dup(number), *how)  # noqa: SIM115

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding
            return self.write(text.encode(encoding, "replace").decode(encoding))
        except self._lost:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except self._lost:
            self._drop()

    def end(self) -> None:
        """Stand for the stream that was given: somebody may keep this object."""
        with contextlib.suppress(OSError):
            self.flush()
        if self._stream is not self._given:
            self._stream.close()
            self._stream = self._given

    def _drop(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (self._stream, self._given):
            os.dup2(null, stream.fileno())
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def survive_closed_streams(*, lasting: bool = True) -> Iterator[None]:
    """While the block runs, no text is too much for stdout and stderr."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # A closed one: the next file to be opened would take its number, and its text.
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    streams = _Stream(before[0], 1, lasting), _Stream(before[1], 2, lasting)
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:  # now: the interpreter's last flush would fail on the closed pipe
            stream.end()
