"""`ray start` on this host, as a child process with the resources and labels of a slice's host."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from pipeline.errors import WorkerLost
from pipeline.execute.ray.runtime_env import STARTING
from pipeline.launch.host import Host

ENDED = "PONENTE_ENDED"  # the file to which a Ray task on this host writes the run's status
_STOP_SECONDS = 15.0


class RayNode:
    """Ray's processes on this host; the context ends them at its exit.

    Args:
        head: address and port of the cluster's head.
        host: this host of the hardware; None for a head outside it.
        first: whether this is the head.
        imitate: imitate the chips on CPUs: this is one of several hosts of one machine.
    """

    def __init__(
        self, head: tuple[str, int], host: Host | None, *, first: bool, imitate: bool
    ) -> None:
        # Under /tmp: the path of a socket in it has at most 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="ponente-", dir="/tmp"))
        self._log, self._ended = self._folder / "log", self._folder / "ended"
        environment = {**STARTING, **os.environ, ENDED: str(self._ended)}
        words = _command(head, host, first=first)
        if imitate:
            # Nodes of one cluster on one machine choose the same socket when they start at the same
            # time in one folder.
            words += [f"--temp-dir={self._folder}", "--num-cpus=1", "--min-worker-port=0"]
            words += ["--max-worker-port=0", "--dashboard-agent-listen-port=0"]
            words += [f"--object-store-memory={80 * 2**20}"]
            words += [] if first else [f"--node-ip-address={head[0]}"]
        if host is not None:
            environment |= host.variables
        if imitate and host is not None:
            count = f"--xla_force_host_platform_device_count={host.hardware.devices_per_process}"
            environment["JAX_PLATFORMS"] = "cpu"
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {count}".strip()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the run, which ends before Ray does
            )

    def __enter__(self) -> RayNode:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def ended(self) -> int | None:
        """The run's exit status, which the head sends to every host; None while it runs."""
        text = self._ended.read_text() if self._ended.exists() else ""
        return int(text) if text else None

    def check(self) -> None:
        """Raise `WorkerLost` with the last lines of Ray's log if Ray has ended."""
        if self._process.poll() is not None:
            lines = self._log.read_text(errors="replace").split("\n")
            last = " ".join(" ".join([x for x in lines if x.strip()][-4:]).split())[-400:]
            raise WorkerLost(f"join: Ray ended on this host: {last}")


def _command(head: tuple[str, int], host: Host | None, *, first: bool) -> list[str]:
    address, port = head
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    words += ["--disable-usage-stats", "--include-log-monitor=false"]
    if first:
        words += ["--head", f"--node-ip-address={address}", f"--port={port}"]
        words += ["--include-dashboard=false"]
    else:
        words += [f"--address={address}:{port}"]
    if host is not None:
        words += [f"--resources={json.dumps(host.resources)}"]
        words += [f"--labels={','.join(f'{k}={v}' for k, v in host.labels.items())}"]
        if host.hardware.kind == "gpu":
            words += [f"--num-gpus={host.hardware.devices_per_process}"]
    return words
