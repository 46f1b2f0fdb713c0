"""What a step's module states about a node before anything runs: lines, data and a refusal.

A step declares it with `@step(facts=...)`. `plan` shows it below the steps, a run in its first
lines; a node with a refusal stops a run before anything is reserved.

    def facts(node: Node, results: Results) -> Facts:
        return Facts(lines=("203,452,416 parameters",), data={"parameters": 203_452_416})

    @step(output=Checkpoint, version=1, facts=facts)
    def train(run: StepContext, ...) -> Result: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.graph.node import Node

# Results of the outputs that are there, by the key of their node.
Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Facts:
    """What is known of one node.

    Attributes:
        lines: for a screen, in order.
        data: the same for programs: JSON values by name.
        refusal: why the step cannot work, in one or more lines; empty where nothing is known
            against it.
        examine: a longer look, seconds to minutes, whose facts come after these; None for none. It
            is called with a function that shows how far it is, in a thread of its own.
    """

    lines: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""
    examine: Callable[[Callable[[str], None]], Facts] | None = None


# From a node and what is published to its facts; `PonenteError` is a refusal.
StateFacts = Callable[["Node", Results], Facts]
