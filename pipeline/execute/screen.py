"""What a step prints, on its way to the user's terminal: in lines, and not too many."""

from __future__ import annotations

import codecs
import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

from pipeline import events
from pipeline.events import Emit

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

    def flush(self) -> None: ...

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

    Whatever they do, nobody waits for a reader, and the text is in the file at once.
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
