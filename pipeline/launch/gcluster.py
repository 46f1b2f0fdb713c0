"""A job of Google's Cluster Toolkit on a GKE cluster that it made: `gcluster job submit`.

It makes a JobSet and gives it to Kueue. Every pod is a host of the slice and joins the first one's
cluster, so that a lost pod ends the whole: the JobSet starts it again, and the run resumes. The
flags are those of cmd/job/submit.go (GoogleCloudPlatform/cluster-toolkit, 2026-06-25).
"""

from __future__ import annotations

import shlex
from dataclasses import replace

from pipeline.launch.job import Job, Provisioning, join, need_one_slice, need_tpu
from pipeline.launch.kuberay import image

_FIRST = "${TPU_WORKER_HOSTNAMES%%,*}"  # GKE gives each pod the names of all
_CLUSTER = '--cluster="${CLUSTER:?set it to the name of the GKE cluster}"'


def provision(job: Job) -> Provisioning:
    """Dockerfile and commands. Raises `InputError` for GPUs, several slices, and no image."""
    hardware = job.hardware
    names = need_tpu(hardware, "gcluster")
    need_one_slice(hardware, "gcluster")
    files, commands = image(job, "gcluster")
    place = f"{_CLUSTER} --location={job.need_zone()}"
    final = replace(job, command=(*job.command, "--final"))  # else a stopped run begins again
    submit = (
        f"gcluster job submit --name={job.name} {place} --image={job.image}"
        # Google's short names count cores for some generations and chips for others.
        f" --compute-type={names.gke} --topology={hardware.topology}"
        f" --num-slices=1 --restarts={10 if job.spot else 2} --grace-period=2m"
        f"{' --gke-nap-provisioning=spot' if job.spot else ''}"
        f" --command={shlex.quote(f'exec {join(final, _FIRST)}')}"
    )
    return Provisioning(
        files=files,
        commands=(*commands, submit),
        needs=("docker", "gcluster"),
        undo=(f"gcluster job cancel {job.name} {place}",),
        after=("# the JobSet as YAML, for kubectl:", f"{submit} --dry-run-out={job.name}.yaml"),
    )
