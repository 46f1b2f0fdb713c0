"""A step on hardware, which predicts how long it takes and writes its shards slowly."""

from __future__ import annotations

import time
from typing import Annotated, Any

from pipeline import Artifact, Hardware, Result, Runtime, StepContext, local, step
from pipeline.graph.facts import Facts, Results
from pipeline.graph.step import Node, as_node

SHARD_SECONDS = 0.05


class Trained(Artifact):
    """Its output."""


def predicted(node: Node, results: Results) -> Facts:
    return Facts(seconds=lambda: node.config["seconds"])


def write(directory: str, item: int) -> dict[str, Any]:
    time.sleep(SHARD_SECONDS)
    return {"item": item}


@step(output=Trained, version=1, facts=predicted)
def train(
    run: StepContext,
    *,
    steps: int = 1,
    seconds: float = 0.0,
    hardware: Annotated[Hardware, Runtime] = local(),
) -> Result:
    shards = run.map(write, {f"{index:04d}": index for index in range(steps)})
    return {"steps": len(shards)}


@step(output=Trained, version=1)
def evaluated(
    run: StepContext, *, text: str = "", hardware: Annotated[Hardware, Runtime] = local()
) -> Result:
    """A step of which a plan knows nothing."""
    del run, text, hardware
    return {}


def trained(hardware: Hardware, steps: int = 1, seconds: float = 0.0) -> Node:
    return as_node(train(steps=steps, seconds=seconds, hardware=hardware))
