"""Plain gcloud commands: a managed instance group of Compute Engine, or a queued resource.

The Cloud TPU API, and with it queued resources, is no longer developed; v4 and v5e exist only
there. A managed group with a workload policy is a slice of v5p or v6e. In both, a small VM outside
the slice is the head, so that the driver survives the loss of the slice. The head requests the
slice: the last command of `launch` is the only one that makes something that costs money.
"""

from __future__ import annotations

from pipeline.errors import InputError
from pipeline.launch.google import accelerator_type, google_of, need_one_slice
from pipeline.launch.job import FOLDER, Job, Recipe
from pipeline.launch.shell import Chips, delete_head, head_name, scripts

_HEAD_MACHINE = "e2-standard-8"
_BOOT_DISK = "--boot-disk-size=200GB"
_NAMES = '--format="value(name.basename())"'


def group(job: Job) -> Recipe:
    """A managed instance group with a workload policy.

    Raises:
        InputError: for a generation that Compute Engine does not have, or several slices.
    """
    need_one_slice(job.hardware, "gcloud")
    hardware, google, zone = job.hardware, google_of(job.hardware, "gcloud"), job.need_zone()
    if not google.grouped:
        raise InputError(
            f"--on gcloud: Compute Engine has no groups of {hardware.generation}; use --on queued"
        )
    name, region = job.name, job.region
    spot = " --provisioning-model=SPOT --instance-termination-action=STOP" if job.spot else ""
    template = (
        f"gcloud compute instance-templates create {name}"
        f" --machine-type={google.machine_type(hardware)} --maintenance-policy=TERMINATE{spot}"
        ' --image-family="${TPU_IMAGE_FAMILY:?set it to a family of ubuntu-os-accelerator-images}"'
        f" --image-project=ubuntu-os-accelerator-images {_BOOT_DISK} --scopes=cloud-platform"
        f" --metadata-from-file=startup-script={FOLDER}/{name}.host.sh"
    )
    policy, make_policy, free = "", "", [f"instance-templates delete {name} --quiet"]
    if hardware.processes > 1:
        make_policy = (
            f"gcloud compute resource-policies create workload-policy {name} --region={region}"
            f" --type=HIGH_THROUGHPUT --accelerator-topology={hardware.topology}"
        )
        project = "$(gcloud config get-value project)"
        policy = f' --workload-policy="projects/{project}/regions/{region}/resourcePolicies/{name}"'
        free += [f"resource-policies delete {name} --region={region} --quiet"]
    chips = Chips(
        create=f"gcloud compute instance-groups managed create {name} --zone={zone}"
        f" --template={name} --size={hardware.processes}{policy}",
        exist=f"gcloud compute instance-groups managed list-instances {name} --zone={zone}"
        ' --format="value(instanceStatus)" | grep -x RUNNING',
        listed=f"gcloud compute instance-groups managed list --zones={zone} {_NAMES}",
        delete=f"gcloud compute instance-groups managed delete {name} --zone={zone} --quiet",
    )
    return Recipe(
        files=scripts(job, chips),
        commands=tuple(filter(None, (_send(job), make_policy, template, _head(job)))),
        needs=("gcloud",),
        undo=(delete_head(job), chips.delete),
        after=(
            "# free, and in the way of the next launch of this name:\n"
            + "\n".join(f"gcloud compute {words}" for words in free),
        ),
    )


def queued(job: Job) -> Recipe:
    """A queued resource of the Cloud TPU API, which waits for free chips.

    Each of several slices is a node, and all nodes become available at once.
    """
    hardware, google, zone = job.hardware, google_of(job.hardware, "queued"), job.need_zone()
    name = job.name
    nodes = f"--node-id={name}"
    if hardware.slices > 1:
        nodes = f"--node-prefix={name} --node-count={hardware.slices}"
    request = (
        f"gcloud compute tpus queued-resources create {name} {nodes} --zone={zone}"
        f" --accelerator-type={accelerator_type(hardware)} --runtime-version={google.runtime}"
        f" --metadata-from-file=startup-script={FOLDER}/{name}.host.sh"
        f"{' --spot' if job.spot else ''}"
    )
    chips = Chips(
        create=request,
        exist=f"gcloud compute tpus queued-resources describe {name} --zone={zone}"
        ' --format="value(state.state)" | grep -x ACTIVE',
        listed=f"gcloud compute tpus queued-resources list --zone={zone} {_NAMES}",
        delete=f"gcloud compute tpus queued-resources delete {name} --zone={zone} --force --quiet",
    )
    return Recipe(
        files=scripts(job, chips),
        commands=(_send(job), _head(job)),
        needs=("gcloud",),
        undo=(delete_head(job), chips.delete),
        after=(
            "# a lost slice keeps its name and quota until it is deleted and requested again:\n"
            f"{chips.delete} && {request}",
        ),
    )


def _send(job: Job) -> str:
    return f"gcloud storage cp {FOLDER}/{job.packed} {job.bundle}"


def _head(job: Job) -> str:
    return (
        f"gcloud compute instances create {head_name(job)} --zone={job.zone}"
        f" --machine-type={_HEAD_MACHINE} --image-family=ubuntu-2204-lts"
        f" --image-project=ubuntu-os-cloud {_BOOT_DISK} --scopes=cloud-platform"
        f" --metadata-from-file=startup-script={FOLDER}/{job.name}.head.sh"
    )
