"""A KubeRay RayJob for a multi-host TPU group, or hosts with GPUs, and the image it runs.

All hosts run one image, so packages and code are equal and `ponente join` is not needed.
"""

from __future__ import annotations

import importlib.metadata
import shlex
from typing import Any

from pipeline.errors import InputError
from pipeline.launch.job import FOLDER, GOOGLE, Job, Provisioning, machine_type

_HEAD = {"cpu": "8", "memory": "32G"}
# Requests of one TPU host: less than a node has, because its system needs some.
_TPU_HOST = {"cpu": "24", "memory": "100G"}
_GPU_HOST = {"cpu": "32", "memory": "200G"}
_GKE_GPUS = {
    "a100": "nvidia-a100-80gb",
    "h100": "nvidia-h100-80gb",
    "h200": "nvidia-h200-141gb",
    "b200": "nvidia-b200",
}
_TPU_ENVIRONMENT = [
    {"name": "NODE_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}},
    {"name": "VBAR_CONTROL_SERVICE_URL", "value": "$(NODE_IP):8353"},
    {"name": "JAX_PLATFORMS", "value": "tpu,cpu"},
    {"name": "ENABLE_PJRT_COMPATIBILITY", "value": "true"},
]
_DOCKERFILE = """\
FROM python:3.11-slim
RUN apt-get -q update && apt-get -q -y install make wget git && rm -rf /var/lib/apt/lists/*
WORKDIR /app
ADD {packed} /app
RUN make setup
ENV PATH=/app/.venv/bin:$PATH
"""


def provision(job: Job) -> Provisioning:
    """Dockerfile, RayJob and commands. Raises `InputError` without an image to push to."""
    files, commands = image(job, "kuberay")
    file, slices = f"{job.name}.rayjob.yaml", job.hardware.slices
    pools = [f"{job.name}-{n}" for n in range(slices)] if slices > 1 else [job.name]
    delete = 'gcloud container node-pools delete {} --cluster="$CLUSTER" --zone={}'
    return Provisioning(
        files=files | {file: job.to_yaml(ray_job(job))},
        commands=(
            *commands,
            *(_node_pool(job, pool) for pool in pools),
            # `apply` would leave a finished job of this name as it is, and run nothing.
            f"kubectl create -f {FOLDER}/{file}",
        ),
        needs=("docker", "gcloud", "kubectl"),
        undo=(
            f"kubectl delete -f {FOLDER}/{file}",
            *(delete.format(pool, job.zone) for pool in pools),
        ),
    )


def image(job: Job, tool: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """The Dockerfile, and the commands that build and push the job's image."""
    if not job.image:
        raise InputError(f"--on {tool}: give --image REGISTRY/NAME:TAG, which is built and pushed")
    file = f"{job.name}.Dockerfile"
    build = f"docker build -t {job.image} -f {FOLDER}/{file} {FOLDER}"
    text = job.origin() + _DOCKERFILE.format(packed=job.packed)
    return {file: text}, (build, f"docker push {job.image}")


def _node_pool(job: Job, name: str) -> str:
    """The command that creates a node pool, the hosts of one slice, unless there is one."""
    hardware, zone = job.hardware, job.need_zone()
    place = f'{name} --cluster="${{CLUSTER:?set it to the name of the GKE cluster}}" --zone={zone}'
    words = [
        f"gcloud container node-pools describe {place} --format='value(status)' ||",
        # From none to all machines and back, by the pods that want them; so none is left over.
        f"gcloud container node-pools create {place} --num-nodes=0 --enable-autoscaling",
        f"--min-nodes=0 --max-nodes={hardware.hosts_per_slice}",
    ]
    if hardware.kind == "tpu":
        words.append(f"--machine-type={machine_type(hardware)} --tpu-topology={hardware.topology}")
    else:
        count, kind = hardware.chips_per_process, _GKE_GPUS[hardware.generation]
        words.append('--machine-type="${MACHINE_TYPE:?set it to one with these GPUs}"')
        words.append(f"--accelerator=type={kind},count={count}")
    return " ".join([*words, *(["--spot"] if job.spot else [])])


def ray_job(job: Job) -> dict[str, Any]:
    """The RayJob in the form of a Kubernetes resource."""
    # A slice is one replica of many hosts; hosts with GPUs are replicas of their own.
    hosts = job.hardware.hosts_per_slice if job.hardware.kind == "tpu" else 1
    replicas = job.hardware.processes // hosts
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
    head = {
        "name": "ray-head",
        "image": job.image,
        "ports": [{"containerPort": port, "name": name} for name, port in ports.items()],
        "resources": {"limits": _HEAD, "requests": _HEAD},
    }
    group = {
        "groupName": "hosts",
        **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), replicas),
        "numOfHosts": hosts,
        "rayStartParams": {},
        "template": {"spec": _host(job)},
    }
    cluster = {
        "rayVersion": importlib.metadata.version("ray"),
        "headGroupSpec": {"rayStartParams": {}, "template": {"spec": {"containers": [head]}}},
        "workerGroupSpecs": [group],
    }
    program, verb, file, *flags = job.command
    # Neither is a stopped run tried again, nor one whose budget is spent. KubeRay's submitter reads
    # the entrypoint as a shell does, and would run what follows a semicolon itself.
    words = [program, verb, f"/app/{file}", *flags, "--cluster", "auto", "--final"]
    spec = {
        "entrypoint": shlex.join(words),
        "shutdownAfterJobFinishes": True,
        # The executor survives a lost host; after a lost head the job needs a new cluster.
        "backoffLimit": 10 if job.spot else 2,
        "rayClusterSpec": cluster,
    }
    named = {"metadata": {"name": job.name}, "spec": spec}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", **named}


def _host(job: Job) -> dict[str, Any]:
    hardware, count = job.hardware, str(job.hardware.chips_per_process)
    container: dict[str, Any] = {"name": "ray-worker", "image": job.image}
    if hardware.kind == "tpu":
        wants = {**_TPU_HOST, "google.com/tpu": count}
        container["env"] = _TPU_ENVIRONMENT
        container["ports"] = [{"containerPort": 8081, "name": "mxla"}]
        selector = {
            "cloud.google.com/gke-tpu-accelerator": GOOGLE[hardware.generation].gke,
            "cloud.google.com/gke-tpu-topology": hardware.topology,
        }
    else:
        wants = {**_GPU_HOST, "nvidia.com/gpu": count}
        selector = {"cloud.google.com/gke-accelerator": _GKE_GPUS[hardware.generation]}
    if job.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    container["resources"] = {"limits": wants, "requests": wants}
    # A host whose Ray ends starts it again.
    return {"containers": [container], "nodeSelector": selector, "restartPolicy": "Always"}
