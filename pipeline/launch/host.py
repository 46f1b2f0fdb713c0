"""This host's place in its hardware (slice, worker number, chips), and its software.

Sources that contradict each other are refused, because libtpu uses what the machine has.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.metadata
import json
import os
import re
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline import holders
from pipeline.accelerators import GPUS, TPUS
from pipeline.errors import InputError
from pipeline.graph.hardware import Hardware, pod
from pipeline.launch.job import accelerator_type

VARIABLES = {
    "type": "TPU_ACCELERATOR_TYPE",
    "topology": "TPU_TOPOLOGY",
    "worker id": "TPU_WORKER_ID",
    "name": "TPU_NAME",
    "slices": "MEGASCALE_NUM_SLICES",
    "slice id": "MEGASCALE_SLICE_ID",
}
LABEL = "ponente-host"  # Ray's label with the number of a host in the hardware
CLOCK_SECONDS = 10.0  # a larger offset breaks signed store requests and the order of logs
_DEVICES = {"tpu": holders.CHIPS, "gpu": ("nvidia[0-9]*",)}
_SHOWN = 3
_METADATA_SECONDS = 2.0
_METADATA_TRIES = 3


@dataclass(frozen=True)
class Host:
    """One host of a slice, of one of several slices, or of a group with GPUs."""

    hardware: Hardware  # all slices or hosts, of which this is one
    worker: int  # number of this host in its slice, from 0
    name: str  # of the hardware, the same on all its hosts
    slice_id: int = 0  # number of its slice, from 0

    def __str__(self) -> str:
        return f"host {self.index} of {self.hardware.processes} of {self.hardware.name}"

    @property
    def index(self) -> int:  # in the hardware, from 0
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
        return {
            "TPU_ACCELERATOR_TYPE": accelerator_type(self.hardware),
            "TPU_TOPOLOGY": self.hardware.topology,
            "TPU_WORKER_ID": str(self.worker),
            "TPU_NAME": self.slice_name,
        }

    @property
    def ray_type(self) -> str:
        """Ray's name of one slice."""
        return f"{TPUS[self.hardware.generation].ray_name}-{self.hardware.name.partition('-')[2]}"

    @property
    def resources(self) -> dict[str, float]:
        """Ray's resources of this host; the "-head" one of its first host reserves a slice."""
        if self.hardware.kind == "gpu":
            return {f"accelerator_type:{GPUS[self.hardware.generation].ray_type}": 1}
        found = {
            "TPU": float(self.hardware.chips_per_process),
            self.slice_name: 1.0,
            f"accelerator_type:{TPUS[self.hardware.generation].ray_type}": 1.0,
        }
        head = f"TPU-{self.ray_type}-head"
        return found | ({head: 1.0} if self.worker == 0 else {})

    @property
    def labels(self) -> dict[str, str]:
        """This host's number, and from what else Ray identifies the hosts of one slice."""
        if self.hardware.kind != "tpu":
            return {LABEL: str(self.index)}
        return {
            LABEL: str(self.index),
            "ray.io/tpu-slice-name": self.slice_name,
            "ray.io/tpu-worker-id": str(self.worker),
            "ray.io/tpu-topology": self.hardware.topology,
            "ray.io/tpu-pod-type": self.ray_type,
            "ray.io/accelerator-type": TPUS[self.hardware.generation].ray_type,
        }


def find(hardware: str, worker: str, name: str, slice_id: str = "") -> Host:
    """This host, from the arguments (empty if not given), the environment and the metadata."""
    given = {"worker id": worker, "slice id": slice_id}
    if hardware and (named := pod(hardware)).kind == "tpu":
        given |= {"topology": named.topology, "type": accelerator_type(named)}
        given |= {"slices": str(named.slices)} if named.slices > 1 else {}
    sources = {
        "the command line": given,
        "the environment": {fact: os.environ.get(name, "") for fact, name in VARIABLES.items()},
        "the machine's metadata": slice_metadata(),
    }
    facts: dict[str, str] = {}
    for fact in VARIABLES:
        found = {source: known[fact] for source, known in sources.items() if known.get(fact)}
        if len(set(found.values())) > 1 and fact != "name":
            each = ", ".join(f"{value} by {source}" for source, value in found.items())
            raise InputError(f"join: the slice's {fact} differs: {each}; correct the wrong one")
        facts[fact] = next(iter(found.values()), "")
    if not hardware:
        if not facts["type"]:
            raise InputError(
                "join: this host's slice is neither in TPU_ACCELERATOR_TYPE nor in the machine's "
                "metadata; give --hardware"
            )
        times = f"{facts['slices']}x" if facts["slices"] not in ("", "1") else ""
        hardware = times + facts["type"].replace("v5litepod", "v5e").replace("tpu", "v")
    wanted = pod(hardware)
    number = _number("worker id", facts, wanted.hosts_per_slice, wanted)
    of_slice = _number("slice id", facts, wanted.slices, wanted)
    return Host(wanted, number, name or facts["name"] or "slice", of_slice)


def slice_metadata() -> dict[str, str]:
    """What the machine's metadata says of this host's slice, by the names of `VARIABLES`."""
    found: dict[str, Any] = {}
    # Google's own clients read this variable too.
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/?recursive=true"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    for _ in range(_METADATA_TRIES):
        try:
            with urllib.request.urlopen(request, timeout=_METADATA_SECONDS) as answer:
                found = json.load(answer)
            break
        except (OSError, ValueError) as error:
            # Elsewhere there is no such host; on Google's machines it may be slow at boot.
            if not isinstance(getattr(error, "reason", error), TimeoutError):
                break
    # Lines of `NAME: 'value'`.
    more = dict(re.findall(r"^\s*(\w+):\s*'?([^'\n]*?)'?\s*$", found.get("tpu-env", ""), re.M))
    facts = {
        "type": found.get("accelerator-type") or more.get("ACCELERATOR_TYPE", ""),
        "topology": more.get("TOPOLOGY", ""),
        "worker id": found.get("agent-worker-number") or more.get("WORKER_ID", ""),
        "name": found.get("instance-id") or more.get("NODE_ID", ""),
        "slices": more.get("MEGASCALE_NUM_SLICES", ""),
        "slice id": more.get("MEGASCALE_SLICE_ID", ""),
    }
    return {fact: str(value) for fact, value in facts.items()}


def _number(fact: str, facts: Mapping[str, str], count: int, wanted: Hardware) -> int:
    text = facts[fact] or ("0" if count == 1 else "")
    if text.isdecimal() and int(text) < count:
        return int(text)
    raise InputError(
        f"join: expected a {fact} from 0 to {count - 1} on {wanted.name}, "
        f"{f'found {text!r}' if text else 'found none'}; it is read from {VARIABLES[fact]} and the "
        f"machine's metadata, or give --{fact.replace(' ', '-')}"
    )


def check_chips(host: Host, devices: str = "/dev", seconds: float = 60.0) -> None:
    """Return once this machine shows its chips and no other process holds them.

    Raises `InputError` if not within `seconds` of a boot, or of an earlier run's end.
    """
    patterns, deadline = _DEVICES[host.hardware.kind], time.monotonic() + seconds
    wanted = host.hardware.chips_per_process
    while (seen := max(len(glob.glob(f"{devices}/{each}")) for each in patterns)) != wanted:
        if time.monotonic() >= deadline:
            raise InputError(
                f"{host} cannot join: expected {wanted} chips, this machine shows {seen} under "
                f"{devices}; recreate it, or end the process that holds them"
            )
        time.sleep(1.0)
    if host.hardware.kind == "tpu":
        holders.unlock()
    while host.hardware.kind == "tpu" and (held := holders.chips(devices)):
        if time.monotonic() >= deadline:
            each = "; ".join(f"{one.found}: {one.advice}" for one in held)
            raise InputError(f"{host} cannot join: {each}")
        time.sleep(1.0)


def software() -> tuple[dict[str, str], float]:
    """(digest of the code and versions of packages by name, clock); Ray compares its own."""
    from pipeline.doctor import requirements
    from pipeline.execute.ray.runtime_env import ROOT, code_digest

    found = {"code": code_digest(ROOT)[:16]}
    for name in ("jax", "jaxlib", "libtpu", *sorted(r.name for r in requirements())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found, time.time()


def differences(mine: Mapping[str, str], heads: Mapping[str, str], ahead: float) -> list[str]:
    """What of `software()` keeps a host, whose clock is seconds `ahead`, from joining the head."""
    found = [
        f"{name} {mine.get(name, 'missing')}, the head has {version}"
        for name, version in heads.items()
        # A head without chips may have another libtpu, or none.
        if name != "libtpu" and mine.get(name) != version
    ]
    if len(found) > _SHOWN:
        found[_SHOWN:] = [f"and {len(found) - _SHOWN} more packages"]
    if abs(ahead) > CLOCK_SECONDS:
        where = "ahead of" if ahead > 0 else "behind"
        found.append(f"its clock is {abs(ahead):.0f} s {where} the head's")
    return found
