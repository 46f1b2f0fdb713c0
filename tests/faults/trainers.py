"""Starting, watching and ending trainer processes (`tests.faults.trainer`)."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.compilation import xla_flags

START_SECONDS = 240.0
SPLIT = ("--parallel", '{"sharding": "fsdp", "group": 2}')
"""The state split over two devices."""


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Trainers:
    """A gang of trainer processes of one run, a context; leaving it kills what is left of them.

    `folder` has the token shards. `arguments` are options of every process, `more` those of single
    ones, by index; each process has so many virtual `devices`.
    """

    def __init__(
        self,
        folder: Path | str,
        run: Path,
        *arguments: str,
        processes: int = 1,
        devices: int = 1,
        more: dict[int, Sequence[str]] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self.run = run
        variables = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": xla_flags(devices),
            "ATTEMPT": os.urandom(4).hex(),
            **(environment or {}),
        }
        port = str(free_port())
        command = [sys.executable, "-m", "tests.faults.trainer", str(folder), "--run", str(run)]
        command += [*arguments, "--processes", str(processes), "--port", port]
        self.logs = [run / f"log-{os.urandom(3).hex()}-{i}.txt" for i in range(processes)]
        self.lines: queue.Queue[str] = queue.Queue()
        self.processes = []
        for index, log in enumerate(self.logs):
            extra = (more or {}).get(index, ())
            process = subprocess.Popen(
                [*command, "--index", str(index), *extra],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=log.open("w"),
                text=True,
            )
            self.processes.append(process)
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.put(line.strip())

    def wait_for(self, wanted: Callable[[str], bool], seconds: float = START_SECONDS) -> str:
        """The next line that is wanted; fails when every process ended first."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                line = self.lines.get(timeout=0.2)
            except queue.Empty:
                if all(process.poll() is not None for process in self.processes):
                    break
                continue
            if wanted(line):
                return line
        raise AssertionError(f"the line did not come in {seconds} s\n{self.tail()}")

    def wait_for_step(self, step: int) -> None:
        """Until a process has said that it did `step` or a later one."""
        self.wait_for(lambda line: line.startswith("step ") and int(line.split()[1]) >= step)

    def kill(self, index: int = 0, number: int = signal.SIGKILL) -> None:
        self.processes[index].send_signal(number)

    def ends(self, seconds: float = START_SECONDS) -> list[int]:
        """Wait for all processes; their exit statuses."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise AssertionError(f"not ended after {seconds} s\n{self.tail()}") from error
        return [process.returncode for process in self.processes]

    def report(self, index: int = 0) -> dict[str, Any]:
        return json.loads((self.run / f"report-{index}.json").read_text())

    def log(self) -> str:
        return "\n".join(log.read_text() for log in self.logs)

    def tail(self) -> str:
        """The end of every process's stderr."""
        return "\n".join(log.read_text()[-2000:] for log in self.logs)


def finish(folder: Path | str, run: Path, *arguments: str, **gang: Any) -> dict[str, Any]:
    """Start the run (again) and leave it alone; the report of process 0."""
    with Trainers(folder, run, *arguments, **gang) as trainers:
        statuses = trainers.ends()
        assert set(statuses) == {0}, f"exit {statuses}\n{trainers.tail()}"
        return trainers.report()
