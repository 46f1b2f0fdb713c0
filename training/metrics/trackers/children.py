"""Trackers of a run: a child process each, which follows `metrics.jsonl` as the run writes it.

Whatever a tracker does, the run does not notice: it writes nothing to a tracker and waits for none.
The libraries start threads, catch signals and wait for uploads at exit; they do so in the child,
and one that is slow reads the file later. A child that ends before its run has failed, and its last
words are the reason. When the run ends, also by a kill, its end of the child's standard input is
closed; the child reads the file to the end and finishes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from training.config.validation import check_trackers

logger = logging.getLogger(__name__)


class Trackers:
    """The trackers of one attempt.

    Args:
        names: of `training.config.validation.TRACKERS`.
        context: what they get of the run, as JSON values: `directory` (URL for their files, this
            attempt's own), `run` (name of the run, the same for all its attempts), `build` (tells
            this run's attempts from those of an earlier run of that name; empty where there is only
            one), `config` (the resolved configuration; never an environment) and `path` of the file
            of entries.
        command: of a child; its own module's by default.

    Raises:
        InputError: a name is not one of `TRACKERS`.
    """

    def __init__(
        self,
        names: Sequence[str],
        context: Mapping[str, Any],
        command: Sequence[str] = (sys.executable, "-m", "training.metrics.trackers.follow"),
    ) -> None:
        check_trackers("trackers", names)
        self._reported: set[str] = set()
        self._closing = False
        self._errors: dict[str, IO[bytes]] = {}
        self._children = {name: self._start(name, context, command) for name in names}

    def _start(
        self, name: str, context: Mapping[str, Any], command: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        self._errors[name] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors[name],
            # Ctrl-C and the signals of a job's end are for the run, which then ends the child.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps({"kind": name, **context}, default=str).encode() + b"\n")
            child.stdin.flush()
        except OSError:  # it has ended, which `failures` reports
            logger.debug("tracker %s took no context", name, exc_info=True)
        return child

    def failures(self) -> list[str]:
        """A line about each tracker that has ended since this was called before."""
        found = []
        for name, child in self._children.items():
            if name not in self._reported and child.poll() is not None:
                if child.returncode or not self._closing:
                    reason = self._last_words(name, child.returncode)
                    found.append(f"tracker {name} is off, the run continues without it: {reason}")
                self._reported.add(name)
        return found

    def close(self, seconds: float) -> list[str]:
        """Let all finish, for so long together and no longer; returns the last `failures`."""
        deadline, self._closing = time.monotonic() + seconds, True
        for child in self._children.values():
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # entries that an ended one did not take
                child.stdin.close()
        for name, child in self._children.items():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("tracker %s: not done in time, ended", name)
                self._reported.add(name)
                child.kill()
                child.wait()
        found = self.failures()
        for file in self._errors.values():
            file.close()
        return found

    def _last_words(self, name: str, status: int) -> str:
        self._errors[name].seek(0)
        lines = self._errors[name].read().decode(errors="replace").split("\n")
        text = [line.strip() for line in lines if line.strip()]
        return text[-1][:500] if text else f"its process ended with status {status}"
