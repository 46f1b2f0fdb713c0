"""This host's place in its hardware (slice, worker number, chips), and its software.

A fact comes from the command line, the environment (GKE's variables, which Ray reads too) or the
machine's metadata. Sources that contradict each other are refused, because libtpu uses what the
machine has.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import InputError
from pipeline.graph.hardware import Hardware, pod
from pipeline.launch import metadata
from pipeline.launch.google import accelerator_type

_VARIABLES = {
    "type": "TPU_ACCELERATOR_TYPE",
    "topology": "TPU_TOPOLOGY",
    "worker id": "TPU_WORKER_ID",
    "name": "TPU_NAME",
}
_SLICE_VARIABLES = {"slices": "MEGASCALE_NUM_SLICES", "slice id": "MEGASCALE_SLICE_ID"}
_DEVICES = {"tpu": ("accel[0-9]*", "vfio/[0-9]*"), "gpu": ("nvidia[0-9]*",)}
_COMPUTE = ("jax", "jaxlib", "libtpu", "ray")
CLOCK_SECONDS = 10.0  # a larger offset breaks signed store requests and the order of logs
_SHOWN = 3


@dataclass(frozen=True)
class Host:
    """One host of a slice, of one of several slices, or of a group with GPUs.

    Attributes:
        hardware: all slices or hosts, of which this is one.
        worker: number of this host in its slice, from 0.
        name: name of the hardware, the same on all its hosts.
        slice_id: number of its slice, from 0.
    """

    hardware: Hardware
    worker: int
    name: str
    slice_id: int = 0

    def __str__(self) -> str:
        return f"host {self.index} of {self.hardware.processes} of {self.hardware.name}"

    @property
    def index(self) -> int:
        """Number of this host in the hardware, from 0."""
        return self.slice_id * self.hardware.hosts_per_slice + self.worker

    @property
    def slice_name(self) -> str:
        """Name of this host's slice, the same on all hosts of it and on no other."""
        return f"{self.name}-{self.slice_id}" if self.hardware.slices > 1 else self.name

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables from which Ray and libtpu identify a slice; empty for GPUs."""
        if self.hardware.kind != "tpu":
            return {}
        values = (accelerator_type(self.hardware), self.hardware.topology)
        own = (str(self.worker), self.slice_name)
        return dict(zip(_VARIABLES.values(), (*values, *own), strict=True))


def find(hardware: str, worker: str, name: str, slice_id: str = "") -> Host:
    """This host, from the arguments (empty if not given), the environment and the metadata.

    Raises:
        InputError: a necessary fact is in no source, or two sources differ.
    """
    variables = _VARIABLES | _SLICE_VARIABLES
    sources = {
        "the environment": {k: os.environ.get(v, "") for k, v in variables.items()},
        "the machine's metadata": metadata.known(),
    }
    given = {"worker id": worker, "slice id": slice_id}
    if hardware and (named := pod(hardware)).kind == "tpu":
        given |= {"topology": named.topology, "type": accelerator_type(named)}
        given |= {"slices": str(named.slices)} if named.slices > 1 else {}
    facts = {
        k: _one_value(k, {"the command line": given, **sources}) for k in variables if k != "name"
    }
    if hardware:
        wanted = pod(hardware)
    else:
        if not facts["type"]:
            raise InputError(
                "join: this host's slice is neither in TPU_ACCELERATOR_TYPE nor in the machine's "
                "metadata; give --hardware"
            )
        times = f"{facts['slices']}x" if facts["slices"] not in ("", "1") else ""
        wanted = pod(times + facts["type"].replace("v5litepod", "v5e"))
    number = _number("worker id", facts, wanted.hosts_per_slice, wanted)
    of_slice = _number("slice id", facts, wanted.slices, wanted)
    names = (name, *(source.get("name", "") for source in sources.values()))
    return Host(wanted, number, next(filter(None, names), "slice"), of_slice)


def _number(fact: str, facts: Mapping[str, str], count: int, wanted: Hardware) -> int:
    text = facts[fact] or ("0" if count == 1 else "")
    if text.isdecimal() and int(text) < count:
        return int(text)
    variable = (_VARIABLES | _SLICE_VARIABLES)[fact]
    raise InputError(
        f"join: expected a {fact} from 0 to {count - 1} on {wanted.name}, "
        f"{f'found {text!r}' if text else 'found none'}; it is read from {variable} and the "
        f"machine's metadata, or give --{fact.replace(' ', '-')}"
    )


def _one_value(fact: str, sources: Mapping[str, Mapping[str, str]]) -> str:
    found = {source: facts[fact] for source, facts in sources.items() if facts.get(fact)}
    if len(set(found.values())) > 1:
        each = ", ".join(f"{value} by {source}" for source, value in found.items())
        raise InputError(f"join: the slice's {fact} differs: {each}; correct the wrong one")
    return next(iter(found.values()), "")


def check_chips(host: Host, devices: str = "/dev", seconds: float = 60.0) -> None:
    """Return once this machine shows the chips of a host of the slice, as soon after a boot.

    Raises:
        InputError: it shows another number after `seconds`.
    """
    patterns, deadline = _DEVICES[host.hardware.kind], time.monotonic() + seconds
    while True:
        seen = max(len(glob.glob(os.path.join(devices, pattern))) for pattern in patterns)
        if seen == host.hardware.devices_per_process:
            return
        if time.monotonic() >= deadline:
            break
        time.sleep(1.0)
    raise InputError(
        f"{host} cannot join: expected {host.hardware.devices_per_process} chips, this machine "
        f"shows {seen} under {devices}; recreate it, or end the process that holds them"
    )


def software() -> dict[str, Any]:
    """This host's Python version, package versions by name, and digest of the code."""
    from pipeline.execute.ray.runtime_env import ROOT, code_digest

    packages = {}
    for name in _required():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "python": platform.python_version(),
        "packages": packages,
        "code": code_digest(ROOT)[:16],
    }


def _required() -> list[str]:
    """Names of the packages that the project requires."""
    from packaging.requirements import Requirement

    lines: list[str] = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        lines = importlib.metadata.requires("ponente") or []
    needed = [
        r for r in map(Requirement, lines) if not r.marker or r.marker.evaluate({"extra": ""})
    ]
    return sorted({*_COMPUTE, *(requirement.name for requirement in needed)})


def differences(mine: Mapping[str, Any], heads: Mapping[str, Any], ahead: float) -> list[str]:
    """Lines on the differences of `software()` that keep this host from joining the head.

    Its clock is `ahead` of the head's by so many seconds.
    """
    found = []
    if mine["python"].split(".")[:2] != heads["python"].split(".")[:2]:
        found.append(f"Python {mine['python']}, the head has {heads['python']}")
    found += _few(
        f"{name} {mine['packages'].get(name, 'missing')}, the head has {version}"
        for name, version in heads["packages"].items()
        # A head without chips may have another libtpu, or none.
        if name != "libtpu" and mine["packages"].get(name) != version
    )
    if mine["code"] != heads["code"]:
        found.append(f"code {mine['code']}, the head has {heads['code']}")
    if abs(ahead) > CLOCK_SECONDS:
        where = "ahead of" if ahead > 0 else "behind"
        found.append(f"its clock is {abs(ahead):.0f} s {where} the head's")
    return found


def _few(lines: Any) -> list[str]:
    found = list(lines)
    more = [f"and {len(found) - _SHOWN} more packages"] if len(found) > _SHOWN else []
    return found[:_SHOWN] + more
