"""What a step prints, on its way to the user's terminal: in lines, and not too many."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

SECONDS = 1.0
LINES = 20  # shown per `SECONDS`; the log has all


class Screen:
    """A text stream that reports its lines as "output" events, from a thread.

    Args:
        show: called with the events.
    """

    def __init__(self, show: Callable[[dict[str, Any]], None]) -> None:
        self._show = show
        self._pieces: list[str] = []
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="screen", daemon=True)

    def __enter__(self) -> Screen:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.write("\n")
        self._send()

    def write(self, text: str) -> int:
        """Show the text with the next lines; of a line that is written over, its last version."""
        with self._lock:
            self._pieces.append(text)
        return len(text)

    def flush(self) -> None:
        """Does nothing: lines are sent in time."""

    def _follow(self) -> None:
        while not self._over.wait(SECONDS):
            self._send()

    def _send(self) -> None:
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
                self._show({"event": "output", "text": "\n".join(lines)})


class Copies:
    """A text stream whose text goes to others as well, which may fail.

    Args:
        stream: the stream it stands for.
        others: where the text goes too.
    """

    def __init__(self, stream: Any, *others: Any) -> None:
        self._stream, self._others = stream, others

    def write(self, text: str) -> int:
        """Write the text to all."""
        for other in self._others:
            with contextlib.suppress(OSError):
                other.write(text)
        return self._stream.write(text)

    def end(self, stream: Any) -> None:
        """From now on stand for `stream` alone: somebody may keep this object."""
        self._stream, self._others = stream, ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
