"""Plain gcloud commands: a managed instance group of Compute Engine, or a queued resource.

The Cloud TPU API, and with it queued resources, is no longer developed; v4 and v5e exist only
there, and v7x in groups alone. A managed group with a workload policy is a slice of v5p, v6e or
v7x. In both, a small VM outside the slice is the head, so that the driver survives the loss of the
slice. Making it is the last command of `launch`, and the only one that costs money.

The head requests the chips itself, under a trap that deletes them: they do not exist before the
trap does, and are deleted until a listing confirms it, whatever fails. It is the last to delete
itself. A host restarts `join` while it may be needed. Where it no longer is (the run ended, it
cannot be set up, or no head answers for 20 minutes), its slice is useless too, so the host deletes
the chips: also where the head was killed.
"""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass

from pipeline.errors import InputError
from pipeline.launch.job import (
    FOLDER,
    LOST,
    SETUP,
    Job,
    Provisioning,
    accelerator_type,
    join,
    joined,
    machine_type,
    need_one_slice,
    need_tpu,
    runtime,
)

# Flex-start is of the alpha commands, and ends by itself after 7 days at most
# (cloud.google.com/tpu/docs/request-using-flex-start).
_CAPACITY = {
    "": "",
    "reserved": " --reserved",
    "flex-start": " --provisioning-model=flex-start --max-run-duration=7d",
}
_QUEUE = "48h"  # waiting for chips costs nothing
_HEAD_MACHINE = "e2-standard-8"
_BOOT_DISK = "--boot-disk-size=200GB"
_DELETE_HEAD = "gcloud compute instances delete {job.head} --zone={job.zone} --quiet"
_NAMES = '--format="value(name.basename())"'
# 129 and more: a signal ended it, as when the machine shuts down, to boot again.
_LOST_OR_KILLED = f"{LOST} | 129 | 1[3-9]?"

_MACHINE = """\
#!/bin/bash
%(origin)sset -u -o pipefail
chips() { %(listed)s; }
report() { timeout 5m gcloud storage cp %(disk)s.log "%(folder)s/$HOSTNAME.log"; }
give_back() {
  report
  until
    %(delete)s
    sleep 10  # a request that was interrupted may be listed late
    left=$(chips) && ! grep -qxF %(name)s <<< "$left"
  do echo "%(name)s is not deleted yet; trying again"; done
  echo "%(name)s is deleted"
}
again() {
  for pause in 10 30 90; do
    "$@" && return
    echo "failed: $*; again in $pause s"
    sleep $pause & wait $!  # a signal need not wait for it
  done
  "$@"
}
enter() { mkdir -p %(disk)s && cd %(disk)s && exec >> %(disk)s.log 2>&1 && date; }
install() { timeout 15m bash -o pipefail -c %(install)s; }
"""
# From when there are chips, which are billed, a host has 2400 seconds to join.
_HEAD = """\
request() { chips | grep -xF %(name)s || %(create)s; }
run=''; watch=''; stopped=''
end() {
  trap '' HUP INT TERM
  [ -z "$watch" ] || kill "$watch"
  [ -z "$run" ] || { kill "$run" && wait "$run"; }  # it saves a checkpoint
  give_back
  report
  [ -z "$stopped" ] || return  # this machine may boot again, and then goes on
  touch %(disk)s.ended
  until %(delete_head)s; do sleep 60; done
}
trap end EXIT
trap 'stopped=yes; exit 143' HUP INT TERM
enter && [ ! -e %(disk)s.ended ] && again install && again request || exit
%(join)s &
run=$!
{
  until %(exist)s; do sleep 60; done
  sleep 2400
  grep -q " joined: " %(disk)s.log || { echo "no host joined in time"; kill "$run"; }
} &
watch=$!
wait "$run"
code=$?
run=''
exit $code
"""


@dataclass(frozen=True)
class Chips:
    """Commands for the machines with chips, which all have the job's name."""

    create: str  # requests them
    exist: str  # succeeds once there are some, which are billed, and not only a request
    listed: str  # prints the names of requests and machines
    delete: str


def group(job: Job) -> Provisioning:
    """A managed instance group with a workload policy; one slice of v5p, v6e or v7x."""
    need_one_slice(job.hardware, "gcloud")
    hardware, name, zone, region = job.hardware, job.name, job.need_zone(), job.region
    if not need_tpu(job.hardware, "gcloud").grouped:
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
    need_tpu(hardware, "queued")
    version = runtime(hardware, "queued")
    queue = "gcloud compute tpus queued-resources"
    alpha = queue.replace("gcloud", "gcloud alpha") if job.capacity == "flex-start" else queue
    chips = Chips(
        create=f"{alpha} create {name} {nodes} --zone={zone}"
        f" --accelerator-type={accelerator_type(hardware)} --runtime-version={version}"
        f" --metadata-from-file=startup-script={FOLDER}/{name}.host.sh"
        f"{' --spot' if job.spot else _CAPACITY[job.capacity]}",
        exist=f"{queue} describe {name} --zone={zone}"
        ' --format="value(state.state)" | grep -x ACTIVE',
        listed=f"{queue} list --zone={zone} {_NAMES}",
        delete=f"{queue} delete {name} --zone={zone} --force --quiet",
    )
    later = "# a lost slice keeps its name and quota until it is deleted and requested again:"
    made = _provisioning(job, chips, [], (later, f"{chips.delete} && {chips.create}"))
    heads = f"gcloud compute instances list --zones={zone} {_NAMES}"
    return dataclasses.replace(
        made,
        queue=f"{queue} describe {name} --zone={zone} --format=json",
        listed=(heads, chips.listed),
        names=(name, job.head),
    )


def _provisioning(job: Job, chips: Chips, free: list[str], after: tuple[str, ...]) -> Provisioning:
    send = f"gcloud storage cp {FOLDER}/{job.packed} {job.bundle}"
    head = (
        f"gcloud compute instances create {job.head} --zone={job.zone}"
        f" --machine-type={_HEAD_MACHINE} --image-family=ubuntu-2204-lts"
        f" --image-project=ubuntu-os-cloud {_BOOT_DISK} --scopes=cloud-platform"
        f" --metadata-from-file=startup-script={FOLDER}/{job.name}.head.sh"
    )
    return Provisioning(
        files=scripts(job, chips),
        commands=(send, *free, head),
        needs=("gcloud",),
        undo=(_DELETE_HEAD.format(job=job), chips.delete),
        after=after,
    )


def scripts(job: Job, chips: Chips) -> dict[str, str]:
    """Startup scripts of the head and the hosts, by file name; they run at every boot."""
    install = f"gcloud storage cp {job.bundle} - | tar -xzf - || exit\n{SETUP}"
    values = {
        **vars(chips),
        "origin": job.origin(),
        "name": job.name,
        "folder": job.folder,
        "disk": f"/opt/{job.name}",
        "install": shlex.quote(install),
        "delete_head": _DELETE_HEAD.format(job=job),
        "join": join(job, job.head, f"--queue {_QUEUE}", "--role head"),
    }
    loop = joined(join(job, job.head, "--role host"), _LOST_OR_KILLED)
    return {
        f"{job.name}.head.sh": (_MACHINE + _HEAD) % values,
        f"{job.name}.host.sh": _MACHINE % values + f"enter && again install && {loop}give_back\n",
    }
