"""A process of the ownership trials: builds one step of a store, with leases that go stale quickly.

One JSON line in, one out, as `lease_worker`. The training is the real one, slowed after each step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Annotated, Any

from pipeline import Artifact, InputError, Result, Runtime, StepContext, step
from pipeline.events import RunStarted
from pipeline.execute.backend import InlineBackend
from pipeline.execute.event_log import EventLog
from pipeline.execute.executor import Execution
from pipeline.graph.step import Node, as_node
from pipeline.plan.state import Selection
from pipeline.store import lease, storage
from pipeline.store.outputs import Store
from tests.pipeline.helpers import heard

STEPS = 12
PARTS = 12


class Parts(Artifact):
    """Numbers, one text file a shard."""


def write_part(directory: str, item: tuple[int, float, int]) -> Mapping[str, Any]:
    """Shard writer: one number after a wait; refuses numbers from the third on."""
    number, delay, refused_from = item
    if number >= refused_from:
        raise InputError("asked to refuse")
    time.sleep(delay)
    storage.write_atomic(storage.join(directory, "n.txt"), str(number).encode())
    return {"count": 1}


@step(output=Parts, version=1)
def parts(
    run: StepContext,
    *,
    shards: int,
    delay: Annotated[float, Runtime] = 0.0,
    refused_from: Annotated[int, Runtime] = PARTS,
) -> Result:
    """0 .. shards - 1, a shard each; the first half is mapped, then the rest."""
    items = {f"part/{i:03d}": (i, delay, refused_from) for i in range(shards)}
    first = dict(list(items.items())[: shards // 2])
    written = {**run.map(write_part, first), **run.map(write_part, items)}
    return {"count": len(written)}


def training() -> Node:
    """The tiny run, which keeps two checkpoints and a milestone."""
    from steps.tokens.sequences import block_shuffle
    from steps.training.train import train
    from tests.steps.synthetic import VOCAB, synthetic
    from tests.training import tiny

    config = dataclasses.replace(
        tiny.TRAIN, steps=STEPS, checkpoint_every=1, keep_checkpoints=2, milestones=(3,)
    )
    data = block_shuffle(synthetic(), sequence_length=tiny.LENGTH, io_block_size=4, window_blocks=3)
    model = dataclasses.replace(tiny.MODEL, vocab_size=VOCAB)
    optimizer = dataclasses.replace(tiny.OPTIMIZER, schedule="constant")
    return as_node(train(data, model=model, optimizer=optimizer, train=config))


def node_of(order: Mapping[str, Any]) -> Node:
    if order["kind"] == "train":
        return training()
    return as_node(parts(shards=PARTS, delay=order["delay"], refused_from=order["refused_from"]))


def execute(order: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in order["lease"].items():
        setattr(lease, name, value)
    store, node, statuses = order["store"], node_of(order), []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "finished" and event["key"] == node.key:
            statuses.append(event["status"])
        if event["event"] in ("progress", "started") and event["key"] == node.key:
            with open(order["marks"], "a") as file:
                file.write(f"{os.getpid()} {event.get('done', 0)}\n")
            time.sleep(order["delay"])

    log = EventLog(store, f"run-{os.getpid()}-{time.monotonic_ns()}", [heard(listen)])
    log.emit(RunStarted(graph=[{"directory": node.directory}]))
    force = (node.label,) if order.get("force") else ()
    try:
        execution = Execution([node], Store(store), log, "again", Selection(force=force))
        execution.run(InlineBackend(log), execution.look())
    except Exception:  # noqa: BLE001 - the answer carries whatever a run can raise
        return {"error": traceback.format_exc(), "statuses": statuses}
    finally:
        log.close()
    return {"error": None, "statuses": statuses}


def main() -> None:
    for line in sys.stdin:
        answer = execute(json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
