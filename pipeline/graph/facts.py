"""Facts that a step computes about a node before anything runs: lines, data and a refusal.

A step declares them with `@step(facts=...)`. `plan` shows them below the steps, a run in its first
lines; a node with a refusal stops a run before any hardware is reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.store.outputs import Found

Results = Mapping[str, Mapping[str, Any]]
"""Results of the published outputs, by the key of their node; those of a store are `Published`."""


class Published(dict[str, Mapping[str, Any]]):
    """Results of the outputs in the store at `prefix`; `places` are (URL, manifest) by key.

    `learning`: whether forecasts are corrected by what other outputs of the store measured.
    """

    def __init__(self, found: Mapping[str, Found], prefix: str, *, learning: bool = True) -> None:
        super().__init__({key: each.manifest.result for key, each in found.items()})
        self.places = {key: (each.path, each.manifest) for key, each in found.items()}
        self.prefix, self.learning = prefix, learning


@dataclass(frozen=True)
class Facts:
    """Facts about one node.

    Attributes:
        lines: to display; `data` is the same for programs: JSON values by name.
        refusal: why the step cannot work; empty where no reason is known.
        examine: a longer examination, seconds to minutes, which returns further facts. It runs in
            its own thread and gets a function that displays its progress.
    """

    lines: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""
    examine: Callable[[Callable[[str], None]], Facts] | None = None
