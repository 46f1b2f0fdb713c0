"""`--on local`: run the experiment on this machine, which imitates every host of a slice.

The head and each host are a `ponente join` process with imitated chips, and run the same code as on
a real slice. A lost host is restarted, as in a managed group. This machine's CPU computes
everything.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from pipeline.errors import InputError
from pipeline.graph.hardware import Hardware
from pipeline.launch.join import LOST, SECRET

_WAIT = "300s"  # the Rays of the head and all hosts start on one machine
_END_SECONDS = 30.0
_POLL_SECONDS = 1.0
_MOST_HOSTS = 16


def run_local(hardware: Hardware, name: str, command: Sequence[str]) -> int:
    """Start the hosts, run the command, end the hosts, and return the command's exit status.

    Raises:
        InputError: for more hosts than a machine can imitate.
    """
    if hardware.processes > _MOST_HOSTS:
        raise InputError(
            f"--on local: {hardware.name} has {hardware.processes} hosts, expected at most "
            f"{_MOST_HOSTS}; imitate a smaller slice with --hardware"
        )
    join = [sys.executable, "-m", "pipeline.cli", "join", f"127.0.0.1:{_free_port()}"]
    join += ["--hardware", hardware.name, "--name", name, "--wait", _WAIT, "--imitate"]
    environment = {**os.environ, SECRET: secrets.token_hex(32)}
    with _hosts(join, hardware, environment) as hosts:
        head = subprocess.Popen([*join, "--role", "head", "--", *command], env=environment)
        while True:
            try:
                return head.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                hosts.restart_lost()
            except KeyboardInterrupt:
                continue  # the head got SIGINT too, and ends after the run


class _Hosts:
    """The processes that imitate hosts."""

    def __init__(self, join: list[str], hardware: Hardware, environment: Mapping[str, str]) -> None:
        self._join, self._hardware, self._environment = join, hardware, environment
        self.processes = [self._start(index) for index in range(hardware.processes)]

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        # In its own session: Ctrl-C must reach only the run, which needs its hosts to save.
        number, worker = divmod(index, self._hardware.hosts_per_slice)
        return subprocess.Popen(
            [*self._join, "--role", "host", "--worker-id", str(worker), "--slice-id", str(number)],
            env=self._environment,
            start_new_session=True,
        )

    def restart_lost(self) -> None:
        """Restart hosts that were lost or killed; the others ended with the run's status."""
        for index, process in enumerate(self.processes):
            status = process.poll()
            if status is not None and (status == LOST or status < 0):
                self.processes[index] = self._start(index)


@contextlib.contextmanager
def _hosts(join: list[str], hardware: Hardware, environment: Mapping[str, str]) -> Iterator[_Hosts]:
    hosts = _Hosts(join, hardware, environment)
    try:
        yield hosts
        for host in hosts.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.wait(_END_SECONDS)
    finally:
        for host in hosts.processes:
            if host.poll() is None:
                host.send_signal(signal.SIGTERM)
        for host in hosts.processes:
            try:
                host.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(host.pid, signal.SIGKILL)


def _free_port() -> int:
    """A free port whose next port is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            if port < 65000:
                with contextlib.suppress(OSError):
                    second.bind(("127.0.0.1", port + 1))
                    return port
