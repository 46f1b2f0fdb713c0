"""Google's names for the machines, runtimes and accelerators of a slice, by generation.

From cloud.google.com/tpu/docs (runtimes, v4, v5e, v5p, v6e) and from GKE's "Plan TPUs". The counts
of hosts and the topologies are those of `pipeline.accelerators`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.accelerators import TPUS
from pipeline.errors import InputError
from pipeline.graph.hardware import Hardware


@dataclass(frozen=True)
class Google:
    """A generation's names.

    Attributes:
        machine: machine type of a VM; `{}` stands for its number of chips.
        runtime: software version of the Cloud TPU API.
        gke: value of the node label cloud.google.com/gke-tpu-accelerator.
        grouped: whether Compute Engine has it in managed instance groups.
    """

    machine: str
    runtime: str
    gke: str
    grouped: bool

    def machine_type(self, hardware: Hardware) -> str:
        """The machine type of one host."""
        return self.machine.format(hardware.devices_per_process)


GOOGLE = {
    "v4": Google("ct4p-hightpu-{}t", "tpu-ubuntu2204-base", "tpu-v4-podslice", False),
    "v5e": Google("ct5lp-hightpu-{}t", "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", False),
    "v5p": Google("ct5p-hightpu-{}t", "v2-alpha-tpuv5", "tpu-v5p-slice", True),
    "v6e": Google("ct6e-standard-{}t", "v2-alpha-tpuv6e", "tpu-v6e-slice", True),
}


def google_of(hardware: Hardware, tool: str) -> Google:
    """Google's names for a slice. Raises `InputError` for hosts with GPUs."""
    if hardware.kind != "tpu":
        raise InputError(
            f"--on {tool}: expected a TPU slice, got {hardware.name!r}; hosts with GPUs are "
            "launched with --on sky or --on kuberay"
        )
    return GOOGLE[hardware.generation]


def need_one_slice(hardware: Hardware, tool: str) -> None:
    """Raise `InputError` for several slices: this tool makes only one."""
    if hardware.slices > 1:
        raise InputError(
            f"--on {tool}: makes one slice, {hardware.name} is {hardware.slices}; use --on queued "
            "or --on kuberay"
        )


def accelerator_type(hardware: Hardware) -> str:
    """Google's name of one slice, such as v5litepod-8 for v5e-8."""
    return f"{TPUS[hardware.generation].google_name}-{hardware.name.partition('-')[2]}"
