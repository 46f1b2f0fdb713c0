"""Hardware that a step can request: this machine, TPU slices, hosts with GPUs, or CPU processes.

A choice of hardware never enters a step's key. `pod("cpu-2x2")` is two CPU processes of two virtual
devices each on this machine; it runs the multi-host code path where there is no pod.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from pipeline.accelerators import GPUS, TPUS, find_slices
from pipeline.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One gang of processes: all of them run, or none.

    Attributes:
        name: as it was passed to `pod`.
        kind: "local" (one process, every accelerator of this machine), "cpu", "gpu" or "tpu".
        processes: one per host.
        devices_per_process: those of a host's chips, or virtual ones of a CPU process; 0 if local.
        generation: name of the chip in `accelerators`, such as "v6e"; empty for "local" and "cpu".
        topology: ICI topology of one TPU slice, such as "4x4"; empty for other hardware.
        slices: TPU slices, among which the processes are divided equally.
    """

    name: str
    kind: str
    processes: int
    devices_per_process: int
    generation: str = ""
    topology: str = ""
    slices: int = 1

    @property
    def slice_name(self) -> str:
        return self.name.removeprefix(f"{self.slices}x")

    @property
    def hosts_per_slice(self) -> int:
        return self.processes // self.slices

    @property
    def devices(self) -> int:
        """In the whole gang; 0 for "local", where only JAX can count them."""
        return self.processes * self.devices_per_process

    @property
    def chips_per_process(self) -> int:
        """Chips of a host; of CPU processes, their devices."""
        return self.devices_per_process // getattr(TPUS.get(self.generation), "devices", 1)

    @property
    def chips(self) -> int:
        """In the whole gang, as they are paid for; 0 for "local"."""
        return self.processes * self.chips_per_process


def local() -> Hardware:
    return Hardware(name="local", kind="local", processes=1, devices_per_process=0)


def pod(name: str) -> Hardware:
    """Hardware by name.

    "local", a TPU slice by Google's name ("v6e-16", "v5p-8": the number counts chips, or for v4,
    v5p and v7x cores, two per chip), several slices joined by the data-centre network
    ("2xv6e-16"), GPUs of one or of several hosts ("8xh100", "2x8xh100"), or "cpu-<processes>x
    <devices per process>".
    """
    make = partial(Hardware, name=name)
    if name == "local":
        return local()
    if match := re.fullmatch(r"cpu-([1-9]\d?)x([1-9]\d?)", name):
        return make(kind="cpu", processes=int(match[1]), devices_per_process=int(match[2]))
    match = re.fullmatch(r"(?:([1-9]\d{0,3})x)?([1-9]\d?)x([a-z]\w*)", name)
    if match and match[3] in GPUS:
        hosts, devices = int(match[1] or 1), int(match[2])
        return make(kind="gpu", processes=hosts, devices_per_process=devices, generation=match[3])
    if (found := find_slices(name)) is not None:
        hosts = found.tpu.hosts(found.chips)
        return make(
            kind="tpu",
            processes=found.count * hosts,
            devices_per_process=found.chips // hosts * found.tpu.devices,
            generation=found.tpu.name,
            topology=found.tpu.topologies[found.chips],
            slices=found.count,
        )
    raise InputError(f"hardware: expected {_known(name)}; got {name!r}")


def _known(name: str) -> str:
    tpu = TPUS.get(name.rpartition("x")[2].partition("-")[0])
    if tpu is not None:
        return f"one of {', '.join(tpu.names)}, or several such as 2x{next(iter(tpu.names))}"
    tpus = ", ".join(f"{tpu.name}-{16 * tpu.cores}" for tpu in TPUS.values())
    gpus = ", ".join(f"8x{gpu}" for gpu in GPUS)
    return (
        f"local, cpu-<processes>x<devices>, a TPU slice ({tpus}) or several (2xv6e-16), GPUs of a "
        f"host ({gpus}) or of several (2x8xh100)"
    )
