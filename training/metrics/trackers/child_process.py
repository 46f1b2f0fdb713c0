"""A tracker's library in a process of its own, fed with lines of JSON.

Weights & Biases and others start threads, catch signals and wait for uploads at exit. Here they do
so in a child that the run gives entries through a pipe, and kills when it does not end in time; it
has the environment (where such libraries look for their keys) and nothing else of the run. When the
run itself is killed the pipe ends, and the child finishes what it was given.

    python -m training.metrics.trackers.child_process     reads a line with the context, then a line
    an entry
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any

from training.metrics.trackers.context import Entry, TrackerContext
from training.metrics.trackers.files import as_lines

_ENDING_SECONDS = 3600.0  # the tracker's own deadline is the caller's, and shorter


class ChildTracker:
    """A `Tracker` that writes to a child and knows when it has failed.

    Args:
        kind: which tracker.
        context: of the run.
        command: of the child; its own module's by default.
    """

    def __init__(
        self, kind: str, context: TrackerContext, command: Sequence[str] | None = None
    ) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        self._process = subprocess.Popen(
            command or [sys.executable, "-m", "training.metrics.trackers.child_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            # Ctrl-C and the signals of a job's end are for the run, which then ends the child.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._send([{"kind": kind, **dataclasses.asdict(context)}])

    def write(self, entries: Sequence[Entry]) -> None:
        """Raises `RuntimeError` with the child's last words when it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(self._last_words())
        if entries:
            self._send(entries)

    def close(self) -> None:
        """Let the child finish. Raises `RuntimeError` when it failed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait(_ENDING_SECONDS):
            raise RuntimeError(self._last_words())
        self._errors.close()

    def abandon(self) -> None:
        """Kill the child."""
        self._process.kill()

    def _send(self, entries: Sequence[Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(as_lines(entries))
            self._process.stdin.flush()
        except OSError as error:
            self._process.wait(5.0)
            raise RuntimeError(self._last_words()) from error

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        text = [line for line in lines if line.strip()]
        return text[-1] if text else f"its process ended with status {self._process.returncode}"


def main() -> None:
    """Read the context and then entries until the input ends."""
    from training.metrics.trackers.backends import open_backend

    first = json.loads(sys.stdin.readline())
    tracker = open_backend(first.pop("kind"), first)
    for line in sys.stdin:
        tracker.write(json.loads(line))
    tracker.close()


if __name__ == "__main__":
    main()
