"""Google's names of machines, runtimes and accelerators, and what a machine's metadata says of it.

Names are from cloud.google.com/tpu/docs (runtimes, v4, v5e, v5p, v6e) and GKE's "Plan TPUs".
"""

from __future__ import annotations

import functools
import json
import os
import re
import urllib.request
from dataclasses import dataclass

from pipeline.accelerators import TPUS
from pipeline.errors import InputError
from pipeline.graph.hardware import Hardware

_SECONDS = 2.0
_TRIES = 3


@dataclass(frozen=True)
class Google:
    """Names for one TPU generation.

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


GOOGLE = {
    "v4": Google("ct4p-hightpu-{}t", "tpu-ubuntu2204-base", "tpu-v4-podslice", False),
    "v5e": Google("ct5lp-hightpu-{}t", "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice", False),
    "v5p": Google("ct5p-hightpu-{}t", "v2-alpha-tpuv5", "tpu-v5p-slice", True),
    "v6e": Google("ct6e-standard-{}t", "v2-alpha-tpuv6e", "tpu-v6e-slice", True),
}


def machine_type(hardware: Hardware) -> str:
    return GOOGLE[hardware.generation].machine.format(hardware.devices_per_process)


def accelerator_type(hardware: Hardware) -> str:
    """Google's name of one slice, such as v5litepod-8 for v5e-8."""
    return f"{TPUS[hardware.generation].google_name}-{hardware.name.partition('-')[2]}"


def need_one_slice(hardware: Hardware, tool: str) -> None:
    if hardware.slices > 1:
        raise InputError(
            f"--on {tool}: makes one slice, {hardware.name} is {hardware.slices}; use --on queued "
            "or --on kuberay"
        )


@functools.cache
def _attributes() -> dict[str, str]:
    """Metadata of this virtual machine; empty on other machines."""
    # Google's own clients read this variable too.
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/attributes/?recursive=true"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    for _ in range(_TRIES):
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                return {name: str(value) for name, value in json.load(answer).items()}
        except (OSError, ValueError) as error:
            # Elsewhere there is no such host; on Google's machines it may be slow at boot.
            if not isinstance(getattr(error, "reason", error), TimeoutError):
                break
    return {}


def slice_metadata() -> dict[str, str]:
    """What the metadata says of this host's slice, by the names of `host.VARIABLES`."""
    found = _attributes()
    # Lines of `NAME: 'value'`.
    more = dict(re.findall(r"^\s*(\w+):\s*'?([^'\n]*?)'?\s*$", found.get("tpu-env", ""), re.M))
    return {
        "type": found.get("accelerator-type") or more.get("ACCELERATOR_TYPE", ""),
        "topology": more.get("TOPOLOGY", ""),
        "worker id": found.get("agent-worker-number") or more.get("WORKER_ID", ""),
        "name": found.get("instance-id") or more.get("NODE_ID", ""),
        "slices": more.get("MEGASCALE_NUM_SLICES", ""),
        "slice id": more.get("MEGASCALE_SLICE_ID", ""),
    }
