"""What a step asks to run on: this machine, a TPU slice, or a pod of CPU processes.

A choice of hardware is data. It never enters a step's key, and nothing here imports jax or ray.
`pod("cpu-2x2")` is two CPU processes of two virtual devices each on this machine: how everyone
without a pod runs, and tests, the multi-host path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.errors import InputError

# chips -> (ICI topology, hosts). A v6e host carries 4 chips, except the 1- and 8-chip machines
# (ct6e-standard-1t and -8t).
_V6E = {
    1: ("1x1", 1),
    4: ("2x2", 1),
    8: ("2x4", 1),
    16: ("4x4", 4),
    32: ("4x8", 8),
    64: ("8x8", 16),
    128: ("8x16", 32),
    256: ("16x16", 64),
}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One gang of processes: all of them run, or none.

    Attributes:
        name: what the user wrote, for messages.
        kind: "local" (one process, every accelerator of this machine), "cpu" or "tpu".
        processes: processes in the gang, one per host.
        devices_per_process: chips per host, or virtual devices per CPU process; 0 if local.
        generation: TPU generation such as "v6e"; empty elsewhere.
        topology: ICI topology such as "4x4"; empty elsewhere.
    """

    name: str
    kind: str
    processes: int
    devices_per_process: int
    generation: str = ""
    topology: str = ""

    @property
    def devices(self) -> int:
        """Devices in the whole gang; 0 when only the machine itself can tell."""
        return self.processes * self.devices_per_process


def local() -> Hardware:
    """This machine: one process with whatever devices it has."""
    return Hardware(name="local", kind="local", processes=1, devices_per_process=0)


def pod(name: str) -> Hardware:
    """Hardware by name: "local", "v6e-<chips>" or "cpu-<processes>x<devices per process>".

    Raises:
        InputError: for any other name, saying which there are.
    """
    if name == "local":
        return local()
    if match := re.fullmatch(r"cpu-([1-9]\d?)x([1-9]\d?)", name):
        processes, devices = int(match[1]), int(match[2])
        return Hardware(name=name, kind="cpu", processes=processes, devices_per_process=devices)
    if (match := re.fullmatch(r"v6e-(\d+)", name)) and int(match[1]) in _V6E:
        chips = int(match[1])
        topology, hosts = _V6E[chips]
        return Hardware(
            name=name,
            kind="tpu",
            processes=hosts,
            devices_per_process=chips // hosts,
            generation="v6e",
            topology=topology,
        )
    known = ", ".join(f"v6e-{chips}" for chips in _V6E)
    raise InputError(
        f"hardware: expected local, cpu-<processes>x<devices> or one of {known}; got {name!r}"
    )
