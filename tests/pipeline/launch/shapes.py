"""What SkyPilot and KubeRay accept of the files that are generated, written down strictly.

Field names and types are facts of SkyPilot 0.14 (`sky.utils.schemas`) and of KubeRay's RayJob,
API version ray.io/v1; only fields that are used are here.
"""

from __future__ import annotations

import math
from typing import Any

import jsonschema
from ray._private.accelerators.tpu import TPUAcceleratorManager

TEXT, TRUTH, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def closed(tree: Any) -> dict[str, Any]:
    """A JSON schema of objects with these fields, some optional (?), and no other; of lists."""
    if isinstance(tree, list):
        return {"type": "array", "items": closed(tree[0]), "minItems": 1}
    if tree.keys() & {"type", "enum", "const"}:
        return tree
    fields = {name.removesuffix("?"): closed(of) for name, of in tree.items()}
    required = [name for name in tree if not name.endswith("?")]
    made = {"type": "object", "properties": fields, "required": required}
    return {**made, "additionalProperties": False}


REGION = r"^gcp(/[a-z]+-[a-z]+\d+(/[a-z]+-[a-z]+\d+-[a-z])?)?$"
RESOURCES = {
    "infra?": {"type": "string", "pattern": REGION},
    "accelerators": TEXT,
    "accelerator_args?": {"runtime_version": TEXT, "gcp_queued_resource?": TRUTH},
    "use_spot": TRUTH,
    "job_recovery?": {"strategy": TEXT, "max_restarts_on_errors?": COUNT},
}
TASK = {"name": TEXT, "num_nodes?": COUNT, "setup": TEXT, "run": TEXT, "file_mounts?": TEXTS}
SKY = closed({**TASK, "resources": RESOURCES})
FROM = {"fieldRef?": {"fieldPath?": TEXT}}
CONTAINER = {
    "name": TEXT,
    "image": TEXT,
    "ports?": [{"containerPort": COUNT, "name?": TEXT}],
    "env?": [{"name": TEXT, "value?": TEXT, "valueFrom?": FROM}],
    "resources": {"limits": TEXTS, "requests": TEXTS},
}
POD = {
    "containers": [CONTAINER],
    "nodeSelector?": TEXTS,
    "restartPolicy?": {"enum": ["Always", "OnFailure", "Never"]},
}
GROUP = {"rayStartParams?": TEXTS, "template": {"spec": POD}}
COUNTS = dict.fromkeys(("replicas?", "minReplicas?", "maxReplicas?"), COUNT)
CLUSTER = {
    "rayVersion?": TEXT,
    "headGroupSpec": GROUP,
    "workerGroupSpecs": [{**GROUP, **COUNTS, "groupName": TEXT, "numOfHosts": COUNT}],
}
JOB = {"entrypoint": TEXT, "shutdownAfterJobFinishes?": TRUTH, "backoffLimit?": COUNT}
NAME = {"type": "string", "pattern": r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"}
RAY_JOB = closed(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": {"name": NAME},
        "spec": {**JOB, "rayClusterSpec": CLUSTER},
    }
)


def refusal(tree: dict[str, Any], schema: dict[str, Any]) -> str:
    """Why a schema refuses a tree; empty where it does not."""
    errors = jsonschema.Draft202012Validator(schema).iter_errors(tree)
    return "; ".join(error.message for error in errors)


def impossible(tree: dict[str, Any], slices: int = 1) -> str:
    """Why there are no such slices, by Ray's table and by counting; empty if there are."""
    if tree.get("kind") != "RayJob":
        name = tree["resources"]["accelerators"].removeprefix("tpu-")
        good = TPUAcceleratorManager.is_valid_tpu_accelerator_type(name)
        return "" if good or ":" in name else f"no slice is called {name}"
    (group,) = tree["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    selector = pod.get("nodeSelector", {})
    topology = selector.get("cloud.google.com/gke-tpu-topology")
    if topology is None:
        return ""
    chips = int(pod["containers"][0]["resources"]["limits"].get("google.com/tpu", 0))
    accelerator = selector["cloud.google.com/gke-tpu-accelerator"]
    named = accelerator.replace("v5-lite-podslice", "v5litepod").replace("tpu7x", "tpu-v7x")
    generation = named.split("-")[1]
    if not TPUAcceleratorManager.is_valid_tpu_accelerator_topology(generation, topology):
        return f"{generation} has no topology {topology}"
    if group["replicas"] != slices or math.prod(map(int, topology.split("x"))) != (
        chips * group["numOfHosts"]
    ):
        return f"{group['numOfHosts']} hosts of {chips} chips are not a {topology}"
    return ""
