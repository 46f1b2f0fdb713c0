"""The toy graphs declared for our engine, in a module that workers can import."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline import Artifact, Experiment, Result, StepContext, named, step
from pipeline.store import storage
from tests.bench import engine_graphs

SHARD = "all"


class Line(Artifact):
    """One line of text."""

    @property
    def file(self) -> str:
        """Where it is."""
        return storage.join(self.shard(SHARD), engine_graphs.OUTPUT)


@step(output=Line, version=1)
def toy(
    run: StepContext, left: Line | None = None, right: Line | None = None, *, name: str, salt: int
) -> Result:
    """Write the line of one task."""
    parents = [parent.file for parent in (left, right) if parent is not None]
    with run.shard(SHARD) as directory:
        engine_graphs.perform(name, salt, parents, directory)
    return {}


def build(graph: str = "20") -> tuple[Any, ...]:
    """The last layer of a graph of `engine_graphs`."""
    nodes: dict[str, Any] = {}
    for task in engine_graphs.tasks(graph):
        inputs: Iterable[Any] = (nodes[parent] for parent in task.parents)
        nodes[task.name] = named(toy(*inputs, name=task.name, salt=task.salt), task.name)
    return tuple(nodes[name] for name in engine_graphs.targets(graph))


experiment = Experiment(
    build,
    **{
        name + change: {"graph": name + change}
        for name in engine_graphs.SHAPES
        for change in ("", engine_graphs.CHANGED)
    },
)
