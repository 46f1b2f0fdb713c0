"""Facts that a step computes about a node before anything runs: lines, data and a refusal.

A step declares them with `@step(facts=...)`. `plan` shows them below the steps, a run in its first
lines; a node with a refusal stops a run before any hardware is reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.graph.capacity import Capacity
from pipeline.store.outputs import Found

Results = Mapping[str, Mapping[str, Any]]
"""Results of the published outputs, by the key of their node; those of a store are `Published`."""


class Published(dict[str, Mapping[str, Any]]):
    """Results of the outputs in the store at `prefix`; `places` are (URL, manifest) by key.

    With what the command says of its machines. `learning`: whether forecasts are corrected by what
    other outputs of the store measured.
    """

    def __init__(
        self,
        found: Mapping[str, Found],
        prefix: str,
        capacity: Capacity | None = None,
        *,
        learning: bool = True,
    ) -> None:
        super().__init__({key: each.manifest.result for key, each in found.items()})
        self.places = {key: (each.path, each.manifest) for key, each in found.items()}
        self.prefix, self.capacity, self.learning = prefix, capacity or Capacity(), learning


@dataclass(frozen=True)
class Facts:
    """Facts about one node.

    Attributes:
        lines: to display; `data` is the same for programs: JSON values by name.
        refusal: why the step cannot work; empty where no reason is known.
        seconds: returns for how long it will hold its hardware, by the middle of the prediction;
            None where that is not known. It may read the store.
        examine: a longer examination, seconds to minutes, which returns further facts. It runs in
            its own thread and gets a function that displays its progress.
    """

    lines: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""
    seconds: Callable[[], float | None] = lambda: None
    examine: Callable[[Callable[[str], None]], Facts] | None = None
