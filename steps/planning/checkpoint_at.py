"""Whether a finished run has the checkpoint that a step is declared to read."""

from __future__ import annotations

from pipeline.graph.facts import Facts, Published, Results
from pipeline.graph.node import Node
from steps.artifacts import Checkpoint


def checkpoint_at(node: Node, results: Results) -> Facts:
    """No facts. Raises `InputError` for an `at` of which the published input has no checkpoint."""
    at = node.config["at"]
    places = results.places if isinstance(results, Published) and at is not None else {}
    for child in node.inputs.values():
        if child.key in places and issubclass(child.output, Checkpoint):
            child.output(*places[child.key]).at(at)
    return Facts()
