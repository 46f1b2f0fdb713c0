"""Running graphs in tests, and checking what a store holds afterwards."""

from __future__ import annotations

from typing import Any

from pipeline import storage
from pipeline.events import EventLog
from pipeline.executor import Execution, InlineBackend
from pipeline.ledger import Ledger
from pipeline.manifest import load
from pipeline.step import Node, as_node


def bring_up(prefix: str, *wanted: Any, events: list[dict[str, Any]] | None = None) -> Execution:
    """Execute a graph in this process; returns the finished execution."""
    log = EventLog(prefix, "test", [events.append] if events is not None else [])
    execution = Execution([as_node(w) for w in wanted], prefix, log, retry_command="again")
    execution.run(InlineBackend(log), execution.look())
    return execution


def executed(prefix: str, *wanted: Any) -> list[str]:
    """Labels of the steps that a run had to execute."""
    return [node.label for node in bring_up(prefix, *wanted).executed]


def result(prefix: str, wanted: Any) -> dict[str, Any]:
    """The published result of one node."""
    node: Node = as_node(wanted)
    published = load(storage.join(prefix, node.directory))
    assert published is not None
    return published.result


def check_invariants(prefix: str) -> int:
    """What must hold in every store after any disturbance; returns the number of outputs.

    Each manifest verifies byte for byte, each ledger record has its files, and nothing of an
    attempt that nobody refers to is left but its log.
    """
    outputs = 0
    for name in storage.list_names(prefix):
        path = storage.join(prefix, name)
        published = load(path)
        shards = list(Ledger(path).finished().values())
        if published is not None:
            outputs += 1
            assert published.key.startswith(name.rpartition("-")[2])
            shards += published.shards
        for shard in shards:
            for file in shard.files:
                url = storage.join(path, shard.root, file.path)
                assert storage.size(url) == file.size
                assert storage.sha256(url) == file.sha256
    return outputs
