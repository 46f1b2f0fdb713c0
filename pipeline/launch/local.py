"""`--on local`: this machine claims to be every host of a slice, and runs the experiment so.

One `ponente join` process for the head and one for each host, with imitated chips: the way on a
real slice, to the last line. A host that is lost comes back, as in a managed group. What is
computed is computed by this machine's CPU.
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

_WAIT = "300s"  # five Rays start on one machine
_END_SECONDS = 30.0
_POLL_SECONDS = 1.0
_MOST_HOSTS = 16


def run_local(hardware: Hardware, name: str, command: Sequence[str]) -> int:
    """Bring up the hosts, run the command, end the hosts; the command's exit status.

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
                hosts.bring_back()
            except KeyboardInterrupt:
                continue  # the head got it too, and ends when the run has


class _Hosts:
    """The processes that imitate hosts."""

    def __init__(self, join: list[str], hardware: Hardware, environment: Mapping[str, str]) -> None:
        self._join, self._hardware, self._environment = join, hardware, environment
        self.processes = [self._start(index) for index in range(hardware.processes)]

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        # In a session of its own: Ctrl-C is for the run, which still needs its hosts to save.
        number, worker = divmod(index, self._hardware.hosts_per_slice)
        return subprocess.Popen(
            [*self._join, "--role", "host", "--worker-id", str(worker), "--slice-id", str(number)],
            env=self._environment,
            start_new_session=True,
        )

    def bring_back(self) -> None:
        """Start the hosts again that were lost or killed; others ended with the run's status."""
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
    """A port that is free, and the next one too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            if port < 65000:
                with contextlib.suppress(OSError):
                    second.bind(("127.0.0.1", port + 1))
                    return port
