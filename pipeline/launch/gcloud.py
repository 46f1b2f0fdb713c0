"""Plain gcloud commands: a managed instance group of Compute Engine, or a queued resource.

The Cloud TPU API, and with it queued resources, is no longer developed; v4 and v5e exist only
there. A managed group with a workload policy is a slice of v5p or v6e. In both, a small VM outside
the slice is the head, so that the driver survives the loss of the slice.
"""

from __future__ import annotations

from pipeline.errors import InputError
from pipeline.launch.google import accelerator_type, google_of, need_one_slice
from pipeline.launch.job import FOLDER, Job, Recipe
from pipeline.launch.setup_host import QUEUE, SETUP, join
from pipeline.launch.text import origin

_HEAD_MACHINE = "e2-standard-8"
_BOOT_DISK = "--boot-disk-size=200GB"


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
    policy, policies = "", ""
    if hardware.processes > 1:
        policies = (
            f"gcloud compute resource-policies create workload-policy {name} --region={region}"
            f" --type=HIGH_THROUGHPUT --accelerator-topology={hardware.topology}"
        )
        project = "$(gcloud config get-value project)"
        policy = f' --workload-policy="projects/{project}/regions/{region}/resourcePolicies/{name}"'
    make = (
        f"gcloud compute instance-groups managed create {name} --zone={zone}"
        f" --template={name} --size={hardware.processes}{policy}"
    )
    remove = f"gcloud compute instance-groups managed delete {name} --zone={zone} --quiet"
    return Recipe(
        files=_scripts(job, remove),
        commands=tuple(filter(None, (_send(job), _head(job), policies, template, make))),
        needs=("gcloud",),
        after=(
            "# ends the machines, which else cost money:\n" + remove,
            f"gcloud compute instances delete {name}-head --zone={zone} --quiet",
            f"gcloud compute instance-templates delete {name} --quiet",
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
    remove = f"gcloud compute tpus queued-resources delete {name} --zone={zone} --force --quiet"
    return Recipe(
        files=_scripts(job, remove),
        commands=(_send(job), _head(job), request),
        needs=("gcloud",),
        after=(
            f"# a lost slice keeps its name and quota until it is deleted and requested again:\n"
            f"{remove} && {request}",
            "# ends the machines, which else cost money:\n" + remove,
            f"gcloud compute instances delete {name}-head --zone={zone} --quiet",
        ),
    )


def _bundle(job: Job) -> str:
    return f"{job.folder}/code.tar.gz"


def _send(job: Job) -> str:
    left_out = " ".join(f"--exclude=./{name}" for name in (".venv", ".git", "runs", "launch"))
    return f"tar {left_out} -czf - . | gcloud storage cp - {_bundle(job)}"


def _head(job: Job) -> str:
    return (
        f"gcloud compute instances create {job.name}-head --zone={job.zone}"
        f" --machine-type={_HEAD_MACHINE} --image-family=ubuntu-2204-lts"
        f" --image-project=ubuntu-os-cloud {_BOOT_DISK} --scopes=cloud-platform"
        f" --metadata-from-file=startup-script={FOLDER}/{job.name}.head.sh"
    )


def _scripts(job: Job, remove: str) -> dict[str, str]:
    """Startup scripts of the head and the hosts; they run at every boot, also after a loss."""
    top = (
        "#!/bin/bash\n" + origin(job) + "set -eu\n"
        f"mkdir -p /opt/{job.name}\ncd /opt/{job.name}\n"
        f"gcloud storage cp {_bundle(job)} - | tar -xzf -\n" + SETUP
    )
    head = f"{job.name}-head"
    ends = "# However it ended, chips that nothing uses are given back.\n" + remove + "\n"
    start = join(job, head, "--role head", wait=QUEUE).rstrip()
    return {
        f"{job.name}.head.sh": f"{top}{start} || true\n{ends}",
        f"{job.name}.host.sh": top + join(job, head, "--role host"),
    }
