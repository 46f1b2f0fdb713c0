"""Plain gcloud commands: a managed instance group of Compute Engine, or a queued resource.

The Cloud TPU API, and with it queued resources, is no longer developed; v4 and v5e exist only
there. A managed group with a workload policy is a slice of v5p or v6e. In both, a small VM outside
the slice is the head, so that the driver survives the loss of the slice. The head requests the
slice: the last command of `launch` is the only one that makes something that costs money.
"""

from __future__ import annotations

from pipeline.errors import InputError
from pipeline.launch.google import GOOGLE, Google, accelerator_type, machine_type, need_one_slice
from pipeline.launch.job import FOLDER, Job, Provisioning
from pipeline.launch.shell import Chips, delete_head, head_name, scripts

_HEAD_MACHINE = "e2-standard-8"
_BOOT_DISK = "--boot-disk-size=200GB"
_NAMES = '--format="value(name.basename())"'


def group(job: Job) -> Provisioning:
    """A managed instance group with a workload policy; one slice of v5p or v6e."""
    need_one_slice(job.hardware, "gcloud")
    hardware, name, zone, region = job.hardware, job.name, job.need_zone(), job.region
    if not _names(job, "gcloud").grouped:
        raise InputError(
            f"--on gcloud: Compute Engine has no groups of {hardware.generation}; use --on queued"
        )
    spot = " --provisioning-model=SPOT --instance-termination-action=STOP" if job.spot else ""
    template = (
        f"gcloud compute instance-templates create {name}"
        f" --machine-type={machine_type(hardware)} --maintenance-policy=TERMINATE{spot}"
        ' --image-family="${TPU_IMAGE_FAMILY:?set it to a family of ubuntu-os-accelerator-images}"'
        f" --image-project=ubuntu-os-accelerator-images {_BOOT_DISK} --scopes=cloud-platform"
        f" --metadata-from-file=startup-script={FOLDER}/{name}.host.sh"
    )
    free = [f"gcloud compute instance-templates delete {name} --quiet"]
    policy, policies = "", []
    if hardware.processes > 1:
        policies = [
            f"gcloud compute resource-policies create workload-policy {name} --region={region}"
            f" --type=HIGH_THROUGHPUT --accelerator-topology={hardware.topology}"
        ]
        project = "$(gcloud config get-value project)"
        policy = f' --workload-policy="projects/{project}/regions/{region}/resourcePolicies/{name}"'
        free += [f"gcloud compute resource-policies delete {name} --region={region} --quiet"]
    groups = "gcloud compute instance-groups managed"
    chips = Chips(
        create=f"{groups} create {name} --zone={zone} --template={name}"
        f" --size={hardware.processes}{policy}",
        exist=f"{groups} list-instances {name} --zone={zone}"
        ' --format="value(instanceStatus)" | grep -x RUNNING',
        listed=f"{groups} list --zones={zone} {_NAMES}",
        delete=f"{groups} delete {name} --zone={zone} --quiet",
    )
    later = "# free, and in the way of the next launch of this name:"
    return _provisioning(job, chips, [*policies, template], (later, *free))


def queued(job: Job) -> Provisioning:
    """A queued resource of the Cloud TPU API, which waits for free chips.

    Each of several slices is a node, and all nodes become available at once.
    """
    hardware, name, zone = job.hardware, job.name, job.need_zone()
    nodes = f"--node-id={name}"
    if hardware.slices > 1:
        nodes = f"--node-prefix={name} --node-count={hardware.slices}"
    runtime = _names(job, "queued").runtime
    queue = "gcloud compute tpus queued-resources"
    chips = Chips(
        create=f"{queue} create {name} {nodes} --zone={zone}"
        f" --accelerator-type={accelerator_type(hardware)} --runtime-version={runtime}"
        f" --metadata-from-file=startup-script={FOLDER}/{name}.host.sh"
        f"{' --spot' if job.spot else ''}",
        exist=f"{queue} describe {name} --zone={zone}"
        ' --format="value(state.state)" | grep -x ACTIVE',
        listed=f"{queue} list --zone={zone} {_NAMES}",
        delete=f"{queue} delete {name} --zone={zone} --force --quiet",
    )
    later = "# a lost slice keeps its name and quota until it is deleted and requested again:"
    return _provisioning(job, chips, [], (later, f"{chips.delete} && {chips.create}"))


def _names(job: Job, tool: str) -> Google:
    if job.hardware.kind != "tpu":
        raise InputError(
            f"--on {tool}: expected a TPU slice, got {job.hardware.name!r}; hosts with GPUs are "
            "launched with --on sky or --on kuberay"
        )
    return GOOGLE[job.hardware.generation]


def _provisioning(job: Job, chips: Chips, free: list[str], after: tuple[str, ...]) -> Provisioning:
    send = f"gcloud storage cp {FOLDER}/{job.packed} {job.bundle}"
    head = (
        f"gcloud compute instances create {head_name(job)} --zone={job.zone}"
        f" --machine-type={_HEAD_MACHINE} --image-family=ubuntu-2204-lts"
        f" --image-project=ubuntu-os-cloud {_BOOT_DISK} --scopes=cloud-platform"
        f" --metadata-from-file=startup-script={FOLDER}/{job.name}.head.sh"
    )
    return Provisioning(
        files=scripts(job, chips),
        commands=(send, *free, head),
        needs=("gcloud",),
        undo=(delete_head(job), chips.delete),
        after=after,
    )
