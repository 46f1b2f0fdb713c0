"""The tools' own schemas, where they are: SkyPilot's package, and KubeRay's file of RayJob.

SkyPilot's requirements do not fit into this environment, and KubeRay is no package of
Python's; both are too large to keep here. To ask them too, install skypilot==0.14.1 into an
environment of its own, set PONENTE_SKYPILOT to its Python, and PONENTE_KUBERAY_CRD to the file
ray.io_rayjobs.yaml of KubeRay's Helm chart (both Apache 2.0).
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_PRINT = """
import json, sys
from sky.utils import schemas
print(json.dumps([schemas.get_task_schema(), schemas.get_resources_schema()]))
"""


@cache
def skypilot() -> dict[str, Any] | None:
    """SkyPilot's schema of a task with that of its resources; None where it is not installed."""
    python = os.environ.get("PONENTE_SKYPILOT")
    if not python:
        return None
    done = subprocess.run([python, "-c", _PRINT], capture_output=True, text=True, check=True)
    task, resources = json.loads(done.stdout.splitlines()[-1])
    # Its client leaves keys of job_recovery to the server, which refuses those it does not know.
    recovery = resources["properties"]["job_recovery"]["anyOf"][1]
    recovery["additionalProperties"] = False
    task["properties"]["resources"] = resources
    return task


@cache
def kuberay() -> dict[str, Any] | None:
    """KubeRay's schema of a RayJob, closed to unknown fields; None where there is no file."""
    path = os.environ.get("PONENTE_KUBERAY_CRD")
    if not path:
        return None
    versions = yaml.load(Path(path).read_bytes(), yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = (v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1")
    return _closed(schema)


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever it lists properties."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _closed(value) for name, value in schema.items()}
    if isinstance(made.get("properties"), dict) and "additionalProperties" not in made:
        made["additionalProperties"] = False
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    if made.get("type") == "object" and made.get("properties") is None:
        made.setdefault("additionalProperties", True)
    return made
