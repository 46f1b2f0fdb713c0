"""A KubeRay RayJob for a multi-host TPU group, or hosts with GPUs, and the image it runs.

The operator starts Ray on every host; on GKE its webhook sets the variables from which Ray
identifies a slice. All hosts run one image, so Python, packages and code are equal and `ponente
join` is not needed.
"""

from __future__ import annotations

import shlex
from typing import Any

from pipeline.errors import InputError
from pipeline.launch.google import GOOGLE
from pipeline.launch.job import FOLDER, Job, Recipe
from pipeline.launch.text import origin, to_yaml

_HEAD = {"cpu": "8", "memory": "32G"}
# Requests of one TPU host: less than a node has, because its system needs some.
_TPU_HOST = {"cpu": "24", "memory": "100G"}
_GPU_HOST = {"cpu": "32", "memory": "200G"}
_MXLA_PORT = 8081
_GKE_GPUS = {
    "a100": "nvidia-a100-80gb",
    "h100": "nvidia-h100-80gb",
    "h200": "nvidia-h200-141gb",
    "b200": "nvidia-b200",
}

_DOCKERFILE = """\
FROM python:3.11-slim
RUN apt-get -q update && apt-get -q -y install make wget git && rm -rf /var/lib/apt/lists/*
WORKDIR /app
ADD {packed} /app
RUN make setup
ENV PATH=/app/.venv/bin:$PATH
"""


def recipe(job: Job) -> Recipe:
    """Dockerfile, RayJob and commands.

    Raises:
        InputError: without an image to push to.
    """
    if not job.image:
        raise InputError("--on kuberay: give --image REGISTRY/NAME:TAG, which is built and pushed")
    file, docker = f"{job.name}.rayjob.yaml", f"{job.name}.Dockerfile"
    return Recipe(
        files={
            docker: origin(job) + _DOCKERFILE.format(packed=job.packed),
            file: to_yaml(job, ray_job(job)),
        },
        commands=(
            f"docker build -t {job.image} -f {FOLDER}/{docker} {FOLDER}",
            f"docker push {job.image}",
            *(_node_pool(job, pool) for pool in _pools(job)),
            # `apply` would leave a finished job of this name as it is, and run nothing.
            f"kubectl create -f {FOLDER}/{file}",
        ),
        needs=("docker", "gcloud", "kubectl"),
        undo=(
            f"kubectl delete -f {FOLDER}/{file}",
            *(
                f'gcloud container node-pools delete {pool} --cluster="$CLUSTER" --zone={job.zone}'
                for pool in _pools(job)
            ),
        ),
    )


def _pools(job: Job) -> list[str]:
    """Names of the node pools, one for each slice."""
    several = job.hardware.slices > 1
    return [f"{job.name}-{n}" for n in range(job.hardware.slices)] if several else [job.name]


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
        machine = GOOGLE[hardware.generation].machine_type(hardware)
        words.append(f"--machine-type={machine} --tpu-topology={hardware.topology}")
    else:
        count, kind = hardware.devices_per_process, _GKE_GPUS[hardware.generation]
        words.append('--machine-type="${MACHINE_TYPE:?set it to one with these GPUs}"')
        words.append(f"--accelerator=type={kind},count={count}")
    return " ".join([*words, *(["--spot"] if job.spot else [])])


def ray_job(job: Job) -> dict[str, Any]:
    """The RayJob in the form of a Kubernetes resource."""
    import ray

    hardware = job.hardware
    tpu = hardware.kind == "tpu"
    # A slice is one replica of many hosts; hosts with GPUs are replicas of their own.
    hosts = hardware.hosts_per_slice if tpu else 1
    replicas = hardware.processes // hosts
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name},
        "spec": {
            "entrypoint": shlex.join(_in_image(job.command)),
            "shutdownAfterJobFinishes": True,
            # The executor survives a lost host; after a lost head the job needs a new cluster.
            "backoffLimit": 10 if job.spot else 2,
            "rayClusterSpec": {
                "rayVersion": ray.__version__,
                "headGroupSpec": {
                    "rayStartParams": {},
                    "template": {"spec": {"containers": [_head(job)]}},
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "hosts",
                        "replicas": replicas,
                        "minReplicas": replicas,
                        "maxReplicas": replicas,
                        "numOfHosts": hosts,
                        "rayStartParams": {},
                        "template": {"spec": _host(job)},
                    }
                ],
            },
        },
    }


def _in_image(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command with the file's path in the image; it joins the cluster that runs."""
    program, verb, file, *flags = command
    return (program, verb, f"/app/{file}", *flags, "--cluster", "auto")


def _head(job: Job) -> dict[str, Any]:
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
    return {
        "name": "ray-head",
        "image": job.image,
        "ports": [{"containerPort": port, "name": name} for name, port in ports.items()],
        "resources": {"limits": _HEAD, "requests": _HEAD},
    }


def _host(job: Job) -> dict[str, Any]:
    hardware = job.hardware
    container: dict[str, Any] = {"name": "ray-worker", "image": job.image}
    if hardware.kind == "tpu":
        wants = {**_TPU_HOST, "google.com/tpu": str(hardware.devices_per_process)}
        field = {"fieldRef": {"fieldPath": "status.hostIP"}}
        container["env"] = [
            {"name": "NODE_IP", "valueFrom": field},
            {"name": "VBAR_CONTROL_SERVICE_URL", "value": "$(NODE_IP):8353"},
            {"name": "JAX_PLATFORMS", "value": "tpu,cpu"},
            {"name": "ENABLE_PJRT_COMPATIBILITY", "value": "true"},
        ]
        container["ports"] = [{"containerPort": _MXLA_PORT, "name": "mxla"}]
        selector = {
            "cloud.google.com/gke-tpu-accelerator": GOOGLE[hardware.generation].gke,
            "cloud.google.com/gke-tpu-topology": hardware.topology,
        }
    else:
        wants = {**_GPU_HOST, "nvidia.com/gpu": str(hardware.devices_per_process)}
        selector = {"cloud.google.com/gke-accelerator": _GKE_GPUS[hardware.generation]}
    if job.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    container["resources"] = {"limits": wants, "requests": wants}
    # A host whose Ray ends starts it again.
    return {"containers": [container], "nodeSelector": selector, "restartPolicy": "Always"}
