"""A process of the trials of readers beside garbage collection: runs a graph that reads slowly.

One JSON line in, one out, as `lease_worker`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Annotated, Any

from pipeline import Experiment, Result, Runtime, StepContext, step
from pipeline.store import lease, manifest, storage
from tests.pipeline.toy import Numbers, Order, Total, order

PARTS = 6


def write_random(directory: str, item: int) -> Mapping[str, Any]:
    """Shard writer: another number in every build."""
    number = int.from_bytes(os.urandom(4))
    storage.write_atomic(storage.join(directory, "n.txt"), str(number).encode())
    return {"number": number}


@step(output=Numbers, version=1)
def drawn(run: StepContext, *, tag: int) -> Result:
    """Random numbers, a shard each."""
    written = run.map(write_random, {f"part/{i:03d}": i for i in range(PARTS)})
    return {"sum": sum(shard.result["number"] for shard in written.values())}


@step(output=Total, version=1)
def slow(
    run: StepContext, order: Order, numbers: Numbers, *, delay: Annotated[float, Runtime] = 0.0
) -> Result:
    """The sum of the numbers, each opened after a while: as an input, and through another one."""
    sums = []
    for each in (numbers, order.input("numbers", Numbers)):
        values = []
        for shard in each.shards():
            time.sleep(delay)
            url = storage.join(each.home, shard.root, "n.txt")
            values.append(int(storage.read_bytes(url)))
        assert sum(values) == each.result["sum"], "a sum of two builds"
        sums.append(sum(values))
    return {"sums": sums}


def graph(tag: int = 0, delay: float = 0.0, target: str = "slow") -> Any:
    """The numbers, an order that opens them, and who reads both."""
    source = drawn(tag=tag)
    made = order(source)
    return {"drawn": source, "order": made, "slow": slow(made, source, delay=delay)}[target]


def execute(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Run the graph; the answer says how it ended."""
    for name, value in asked["lease"].items():
        setattr(lease, name, value)
    manifest._LATE_SECONDS = 1.0  # what is gone here is gone, no file system shows it late
    try:
        Experiment(graph).run(**asked["run"], executor="inline")
    except Exception:  # noqa: BLE001 - the answer carries whatever a run can raise
        return {"error": traceback.format_exc()}
    return {"error": None}


def main() -> None:
    """Serve orders until stdin ends; what runs display goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        answers.write(json.dumps(execute(json.loads(line))) + "\n")
        answers.flush()
