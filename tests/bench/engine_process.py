"""Processes that are measured: how they are started, timed, killed, and what they left on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_LIMIT_SECONDS = 900.0


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        whole: seconds from starting it to reaping it.
        own: seconds from its script's first line to its interpreter's end; 0 when killed.
        imported: seconds of `own` that went into importing the engine.
        cpu: processor seconds of it and of the children it waited for.
        lines: what it printed, stdout and stderr together.
    """

    code: int
    whole: float
    own: float
    imported: float
    cpu: float
    lines: list[str]


def _inherited() -> dict[str, str]:
    # A cluster or a store named in the environment would be used instead of the measured one.
    own = ("RAY_ADDRESS", "PONENTE_PREFIX")
    return {name: value for name, value in os.environ.items() if name not in own}


class Running:
    """A started process, in a session of its own.

    Args:
        command: what to run, in directory `where`.
        environment: added to this process's own.
        scratch: directory for its output and its clock.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], where: Path, scratch: Path
    ) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        name = f"{time.monotonic_ns()}"
        self._clock, self._output = scratch / f"{name}.json", scratch / f"{name}.txt"
        with self._output.open("wb") as output:
            self._begun = time.perf_counter()
            self._process = subprocess.Popen(
                command,
                cwd=where,
                env={**_inherited(), **environment, "TOY_CLOCK": str(self._clock)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)

    def wait(self, limit: float = _LIMIT_SECONDS) -> Ended:
        """Wait for the end. Raises `TimeoutError`, having killed it, `limit` seconds after start.

        A quarter of an hour, unless said otherwise.
        """
        deadline = self._begun + limit
        while True:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                break
            if time.perf_counter() > deadline:
                self.kill()
                os.wait4(self.pid, 0)
                raise TimeoutError(f"{self._process.args} ran for {limit:g} s")
            time.sleep(0.002)
        whole = time.perf_counter() - self._begun
        self._process.returncode = os.waitstatus_to_exitcode(status)
        clock = json.loads(self._clock.read_text()) if self._clock.exists() else {}
        return Ended(
            code=self._process.returncode,
            whole=whole,
            own=clock.get("own", 0.0),
            imported=clock.get("imported", 0.0),
            cpu=usage.ru_utime + usage.ru_stime,
            lines=self._output.read_text(errors="replace").splitlines(),
        )


def wait_for_line(path: Path, line: str, seconds: float = 120) -> None:
    """Wait until a file has that line. Raises `TimeoutError`."""
    deadline = time.monotonic() + seconds
    while not path.exists() or line not in path.read_text().splitlines():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} has no line {line!r} after {seconds} s")
        time.sleep(0.02)
