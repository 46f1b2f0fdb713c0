"""Ray on this host: a child process with the resources and labels of a slice's host."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from pipeline.accelerators import GPUS, TPUS
from pipeline.errors import WorkerLost
from pipeline.execute.ray.runtime_env import STARTING
from pipeline.graph.hardware import Hardware
from pipeline.launch.google import accelerator_type
from pipeline.launch.host import Host

_STOP_SECONDS = 15.0
_IMITATION_BYTES = 80 * 2**20


def resources(host: Host) -> dict[str, float]:
    """Ray's resources of this host; a slice is reserved by the "-head" one of its first host."""
    hardware = host.hardware
    if hardware.kind == "gpu":
        return {f"accelerator_type:{GPUS[hardware.generation].ray_type}": 1}
    found = {
        "TPU": float(hardware.devices_per_process),
        host.slice_name: 1.0,
        f"accelerator_type:{TPUS[hardware.generation].ray_type}": 1.0,
    }
    return found | ({f"TPU-{accelerator_type(hardware)}-head": 1.0} if host.worker == 0 else {})


def labels(host: Host) -> dict[str, str]:
    """The labels from which Ray identifies the hosts of one slice; empty for GPUs."""
    if host.hardware.kind != "tpu":
        return {}
    return {
        "ray.io/tpu-slice-name": host.slice_name,
        "ray.io/tpu-worker-id": str(host.worker),
        "ray.io/tpu-topology": host.hardware.topology,
        "ray.io/tpu-pod-type": accelerator_type(host.hardware),
        "ray.io/accelerator-type": TPUS[host.hardware.generation].ray_type,
    }


def command(head: tuple[str, int], host: Host | None, *, first: bool, imitate: bool) -> list[str]:
    """The command that starts Ray here.

    Args:
        head: address and port of the cluster's head.
        host: this host of the slice; None for a head outside it.
        first: whether this is the head.
        imitate: whether this is one of several hosts that one machine imitates.
    """
    address, port = head
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    words += ["--disable-usage-stats", "--include-log-monitor=false"]
    if first:
        words += ["--head", f"--node-ip-address={address}", f"--port={port}"]
        words += ["--include-dashboard=false"]
    else:
        words += [f"--address={address}:{port}"]
    if host is not None:
        words += [f"--resources={json.dumps(resources(host))}"]
        words += [f"--labels={','.join(f'{k}={v}' for k, v in labels(host).items())}"]
        if host.hardware.kind == "gpu":
            words += [f"--num-gpus={host.hardware.devices_per_process}"]
    if imitate:
        words += ["--num-cpus=1", f"--object-store-memory={_IMITATION_BYTES}"]
        words += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        words += [] if first else [f"--node-ip-address={address}"]
    return words


def imitation(hardware: Hardware) -> dict[str, str]:
    """The environment that gives a host without chips as many CPU devices."""
    count = hardware.devices_per_process
    flags = os.environ.get("XLA_FLAGS", "")
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={count}".strip(),
    }


class RayNode:
    """Ray's processes on this host; the context ends them at its exit.

    Args:
        words: the command that starts them.
        environment: variables to add to this process's environment.
        apart: whether to give Ray its own folder. Nodes of one cluster on one machine choose the
            same socket when they start at the same time in one folder.
    """

    def __init__(self, words: list[str], environment: Mapping[str, str], *, apart: bool) -> None:
        # Under /tmp: the path of a socket in it has at most 107 characters.
        self._folder = tempfile.mkdtemp(prefix="ponente-", dir="/tmp") if apart else ""
        self._log: Any = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            [*words, *([f"--temp-dir={self._folder}"] if apart else [])],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**STARTING, **os.environ, **environment},
            start_new_session=True,  # Ctrl-C is for the run, which ends before Ray does
        )

    def __enter__(self) -> RayNode:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def alive(self) -> bool:
        """Whether Ray runs."""
        return self._process.poll() is None

    def check(self) -> None:
        """Raise `WorkerLost` with the last lines of Ray's log if Ray has ended."""
        if not self.alive:
            self._log.seek(0)
            lines = [x for x in self._log.read().decode(errors="replace").splitlines() if x.strip()]
            last = " ".join(" ".join(lines[-4:]).split())[-400:]
            raise WorkerLost(f"join: Ray ended on this host: {last}")
