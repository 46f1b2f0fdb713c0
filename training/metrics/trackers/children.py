"""Trackers of a run, each a child process that follows `metrics.jsonl` as the run writes it.

A tracker cannot slow down or end the run, which sends it no metrics and does not wait for it. The
libraries start threads, catch signals and wait for uploads at exit, all in the child; a slow child
only reads the file later. A child that ends before its run has failed, and the last line of its
standard error is the reason. When the run ends, also by a kill, the child's standard input is
closed; the child reads the file to the end and exits.
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

from training.config.trackers import check_trackers

logger = logging.getLogger(__name__)


class Trackers:
    """The trackers `names` of one attempt.

    Args:
        names: names from `training.config.trackers.TRACKERS`.
        context: JSON values that every child gets: `directory` (URL for its files, this attempt's
            own), `shared` (the same for all attempts of the build), `run` (name of the run, the
            same for all its attempts), `build` (distinguishes this run's attempts from those of an
            earlier run of that name), `config` (without environment variables) and `path` (the
            metrics log).
        command: command of a child; by default `training.metrics.trackers.follow`.

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
            # Ctrl-C and a job's end signal only the run's process group; the run ends the child.
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps({"kind": name, **context}, default=str).encode() + b"\n")
            child.stdin.flush()
        except OSError:  # the child has ended, which `failures` reports
            logger.debug("tracker %s did not read its context", name, exc_info=True)
        return child

    def failures(self) -> list[str]:
        """A message for each tracker that failed since the last call."""
        found = []
        for name, child in self._children.items():
            if name not in self._reported and child.poll() is not None:
                if child.returncode or not self._closing:
                    reason = self._last_error(name, child.returncode)
                    found.append(f"tracker {name} is off, the run continues without it: {reason}")
                self._reported.add(name)
        return found

    def close(self, seconds: float) -> list[str]:
        """Wait up to `seconds` for all children, kill the rest; returns the last `failures`."""
        deadline, self._closing = time.monotonic() + seconds, True
        for child in self._children.values():
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the child ended and left input unread
                child.stdin.close()
        for name, child in self._children.items():
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("tracker %s: not done in time, killed", name)
                self._reported.add(name)
                child.kill()
                child.wait()
        found = self.failures()
        for file in self._errors.values():
            file.close()
        return found

    def _last_error(self, name: str, status: int) -> str:
        self._errors[name].seek(0)
        lines = self._errors[name].read().decode(errors="replace").split("\n")
        text = [line.strip() for line in lines if line.strip()]
        return text[-1][:500] if text else f"its process ended with status {status}"
