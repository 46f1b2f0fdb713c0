"""A SkyPilot task: one file for queued resources, spot and recovery, on VMs without Kubernetes."""

from __future__ import annotations

from typing import Any

from pipeline.accelerators import GPUS
from pipeline.launch.job import (
    FOLDER,
    LOST,
    SETUP,
    Job,
    Provisioning,
    accelerator_type,
    join,
    joined,
    need_one_slice,
    runtime,
)

# The first address is the host that starts Ray: SkyPilot has no machine outside the slice.
_HEAD = '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'


def provision(job: Job) -> Provisioning:
    """Task file and commands of a managed job.

    SkyPilot's controller restarts it when hosts are lost, and deletes its machines however it ends.
    A cluster of `sky launch`, even with --down, would stay after a failed set-up.
    """
    need_one_slice(job.hardware, "sky")
    file = f"{job.name}.sky.yaml"
    return Provisioning(
        files={file: job.to_yaml(task(job))},
        commands=(f"sky jobs launch -y -n {job.name} {FOLDER}/{file}",),
        needs=("sky",),
        undo=(f"sky jobs cancel -y -n {job.name}",),
    )


def task(job: Job) -> dict[str, Any]:
    hardware = job.hardware
    made: dict[str, Any] = {"name": job.name}
    resources: dict[str, Any] = {}
    if job.zone:
        resources["infra"] = f"gcp/{job.region}/{job.zone}"
    if hardware.kind == "tpu":
        resources.setdefault("infra", "gcp")
        resources["accelerators"] = f"tpu-{accelerator_type(hardware)}"
        resources["accelerator_args"] = {
            "runtime_version": runtime(hardware, "sky"),
            "gcp_queued_resource": True,
        }
        worker = []  # from the machine: SkyPilot's rank may differ from the slice's worker id
    else:
        kind = GPUS[hardware.generation].ray_type
        resources["accelerators"] = f"{kind}:{hardware.chips_per_process}"
        made["num_nodes"] = hardware.processes
        worker = ['--worker-id "$SKYPILOT_NODE_RANK"']
    resources["use_spot"] = job.spot
    # An experiment's own error would recur, so restart only after lost machines.
    resources["job_recovery"] = {"strategy": "FAILOVER", "max_restarts_on_errors": 0}
    enter = f"mkdir -p ~/{job.name} && cd ~/{job.name}"
    return made | {
        "resources": resources,
        "file_mounts": {f"~/{job.packed}": f"{FOLDER}/{job.packed}"},
        "setup": f"{enter} && tar -xzf ~/{job.packed} || exit\n{SETUP}",
        "run": f"{enter} || exit\n{joined(join(job, _HEAD, *worker), str(LOST))}exit $code\n",
    }
