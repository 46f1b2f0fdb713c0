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


def record(required: str, **fields: Any) -> dict[str, Any]:
    """A JSON schema of an object that has these fields and no other."""
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


def several(of: Any) -> dict[str, Any]:
    """A list of one kind."""
    return {"type": "array", "items": of, "minItems": 1}


TEXTS = {"type": "object", "additionalProperties": TEXT}
SKY = record(
    "name resources setup run",
    name=TEXT,
    num_nodes=COUNT,
    resources=record(
        "accelerators use_spot",
        infra={"type": "string", "pattern": r"^gcp(/[a-z]+-[a-z]+\d+(/[a-z]+-[a-z]+\d+-[a-z])?)?$"},
        accelerators=TEXT,
        accelerator_args=record("runtime_version", runtime_version=TEXT, gcp_queued_resource=TRUTH),
        use_spot=TRUTH,
        job_recovery=record("strategy", strategy=TEXT, max_restarts_on_errors=COUNT),
    ),
    file_mounts=TEXTS,
    setup=TEXT,
    run=TEXT,
)
CONTAINER = record(
    "name image resources",
    name=TEXT,
    image=TEXT,
    ports=several(record("containerPort", containerPort=COUNT, name=TEXT)),
    env=several(
        record(
            "name",
            name=TEXT,
            value=TEXT,
            valueFrom=record("", fieldRef=record("fieldPath", fieldPath=TEXT)),
        )
    ),
    resources=record("limits requests", limits=TEXTS, requests=TEXTS),
)
SPEC = record(
    "containers",
    containers=several(CONTAINER),
    nodeSelector=TEXTS,
    restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
)
POD = record("spec", spec=SPEC)
RAY_JOB = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=record(
        "name", name={"type": "string", "pattern": r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"}
    ),
    spec=record(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        shutdownAfterJobFinishes=TRUTH,
        backoffLimit=COUNT,
        rayClusterSpec=record(
            "headGroupSpec workerGroupSpecs",
            rayVersion=TEXT,
            headGroupSpec=record("template", rayStartParams=TEXTS, template=POD),
            workerGroupSpecs=several(
                record(
                    "groupName template numOfHosts",
                    groupName=TEXT,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    numOfHosts=COUNT,
                    rayStartParams=TEXTS,
                    template=POD,
                )
            ),
        ),
    ),
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
    generation = accelerator.replace("v5-lite-podslice", "v5litepod").split("-")[1]
    if not TPUAcceleratorManager.is_valid_tpu_accelerator_topology(generation, topology):
        return f"{generation} has no topology {topology}"
    if group["replicas"] != slices or math.prod(map(int, topology.split("x"))) != (
        chips * group["numOfHosts"]
    ):
        return f"{group['numOfHosts']} hosts of {chips} chips are not a {topology}"
    return ""
