"""Looking for settings in a declared graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline import Artifact, Result, StepContext, select, step
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from steps.declared import nearest_setting


@step(output=Artifact, version=1)
def stage(run: StepContext, best: Artifact | None = None, *, rate: float) -> Result:
    """A step with a setting."""
    return {}


class _Counted(dict[str, Any]):
    """Inputs that count how often they are looked through."""

    looks = 0

    def values(self) -> Iterator[Any]:
        """The inputs."""
        _Counted.looks += 1
        return iter(super().values())


def test_each_step_is_asked_for_a_setting_once_however_many_ways_lead_to_it():
    """Rounds of candidates and a selection: six times as many ways with every round."""
    best: Any = stage(rate=0.5)
    for _ in range(6):
        best = select(tuple(stage(best, rate=float(k)) for k in range(6)), by="x")
    order = topological([as_node(best)])
    for node in order:
        node.inputs = _Counted(node.inputs)
    assert nearest_setting(best, "no_such_setting") is None
    assert _Counted.looks == len(order)
    assert nearest_setting(best, "rate") == 0.0
