"""How long planning a large graph takes: run as a script, prints seconds as JSON.

A script, so that it can say what a process that only plans has imported.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.execute.event_log import EventLog
from pipeline.execute.executor import Execution
from pipeline.graph.order import topological
from pipeline.graph.step import Node, as_node
from pipeline.identity import source_code
from pipeline.plan.plan import plan
from pipeline.store import storage
from pipeline.store.manifest import NAME, Manifest
from pipeline.store.outputs import Store
from pipeline.store.shards import File, Shard
from tests.pipeline.toy import Scale, numbers, scaled, total


def wide_graph(steps: int, count: int = 4) -> list[Node]:
    """Targets of a graph of exactly `steps` nodes: a source, chains of ten, a total on each."""
    source: Any = numbers(count=count)
    targets, left, factor = [], steps - 1, 0
    while left:
        end, length = source, min(10, left - 1)
        for _ in range(length):
            factor += 1
            end = scaled(end, scale=Scale(factor))
        targets.append(as_node(total(end, source if length else None)))
        left -= length + 1
    return targets


def chain(steps: int, count: int = 4) -> list[Node]:
    """The one target of a graph of `steps` nodes in a row."""
    node: Any = numbers(count=count)
    for _ in range(steps - 1):
        node = scaled(node, scale=Scale(1))
    return [as_node(node)]


def publish(prefix: str, nodes: list[Node]) -> None:
    """Write into a local store what a run would have published: a file, a manifest each."""
    source = functools.cache(source_code.digests)
    for node in nodes:
        path = storage.join(prefix, node.directory)
        directory = Path(storage.join(path, "attempts", "1", "shards", "all"))
        directory.mkdir(parents=True)
        (directory / "n").write_bytes(b"1234")
        shard = Shard("all", "attempts/1/shards/all", (File("n", 4, "0" * 64, ""),), {})
        inputs = {
            name: {"key": child.key, "directory": child.directory, "digest": ""}
            for name, child in node.inputs.items()
        }
        record = Manifest(
            key=node.key,
            step=node.step.name,
            version=node.step.version,
            label=node.label,
            config=node.identity.config,
            inputs=inputs,
            shards=(shard,),
            result={},
            content="",
            action="",
            build="",
            alias=None,
            sources={},
            attempt="1",
            started=0.0,
            seconds=1.0,
            provenance={"sources": source(node.step.function)},
        )
        # Not `create`: fsync would be most of the time.
        Path(path, NAME).write_bytes(record.to_bytes())


def _best(action: Callable[[], Any], times: int = 3) -> float:
    seconds = []
    for _ in range(times):
        clock = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - clock)
    return min(seconds)


def measure(prefix: str, steps: int) -> dict[str, Any]:
    """Seconds to build, plan and look, in an empty store and in a full one, best of three."""

    def planned(store: str, status: str) -> None:
        entries = plan(wide_graph(steps), Store(store))
        assert len(entries) == steps
        assert {entry.status for entry in entries} == {status}

    def looked() -> None:
        log = EventLog(prefix, "clock", [])
        assert Execution(wide_graph(steps), Store(prefix), log, "again").look() == []

    empty = storage.join(prefix, "empty")
    found = {"cold": _best(lambda: planned(empty, "miss"))}
    publish(prefix, topological(wide_graph(steps)))
    found["hit"] = _best(lambda: planned(prefix, "hit"))
    found["look"] = _best(looked)
    return {"seconds": found, "modules": sorted({name.split(".")[0] for name in sys.modules})}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(sys.argv[1], int(sys.argv[2]))) + "\n")
