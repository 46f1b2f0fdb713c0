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
from collections.abc import Sequence

from pipeline.errors import InputError
from pipeline.graph.hardware import Hardware
from pipeline.launch.join import LOST, SECRET

_WAIT = "300s"  # the Rays of the head and all hosts start on one machine
_END_SECONDS = 30.0
_POLL_SECONDS = 1.0
_MOST_HOSTS = 16


def run_local(hardware: Hardware, name: str, command: Sequence[str]) -> int:
    """Start the hosts, run the command, end the hosts, and return the command's exit status."""
    if hardware.processes > _MOST_HOSTS:
        raise InputError(
            f"--on local: {hardware.name} has {hardware.processes} hosts, expected at most "
            f"{_MOST_HOSTS}; imitate a smaller slice with --hardware"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    join = [sys.executable, "-m", "pipeline.cli", "join", f"127.0.0.1:{port}"]
    join += ["--hardware", hardware.name, "--name", name, "--wait", _WAIT, "--imitate"]
    environment = {**os.environ, SECRET: secrets.token_hex(32)}

    def start(index: int) -> subprocess.Popen[bytes]:
        # In its own session: Ctrl-C must reach only the run, which needs its hosts to save.
        number, worker = divmod(index, hardware.hosts_per_slice)
        place = ["--role", "host", "--worker-id", str(worker), "--slice-id", str(number)]
        return subprocess.Popen([*join, *place], env=environment, start_new_session=True)

    hosts = [start(index) for index in range(hardware.processes)]
    try:
        head = subprocess.Popen([*join, "--role", "head", "--", *command], env=environment)
        while head.poll() is None:
            with contextlib.suppress(
                KeyboardInterrupt
            ):  # the head got SIGINT too: wait for its run
                with contextlib.suppress(subprocess.TimeoutExpired):
                    head.wait(_POLL_SECONDS)
                for index, host in enumerate(hosts):
                    lost = (host.poll() or 0) < 0 or host.returncode == LOST
                    if lost and head.returncode is None:
                        hosts[index] = start(index)
        for host in hosts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.wait(_END_SECONDS)
        return head.returncode
    finally:
        for host in hosts:
            host.terminate()
        for host in hosts:
            try:
                host.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(host.pid, signal.SIGKILL)
