"""Graphs of many steps, and a store that has what a run of them would have published."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from pipeline.graph.step import Node, as_node
from pipeline.identity import source_code
from pipeline.store import storage
from pipeline.store.manifest import NAME, Manifest
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
