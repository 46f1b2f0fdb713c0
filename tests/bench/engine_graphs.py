"""The toy graphs of the engine's bench, and an experiment of them.

A step reads a line from each step it depends on and writes one line of its own, which depends on
all of them; so the lines of the last layer say whether the whole graph was computed as declared.
The environment steers the body, so that steering it is part of no step's identity:

- `TOY_MARKS`: a file that gets the step's name each time its body runs;
- `TOY_PAUSE_STEP`, `TOY_PAUSE_SECONDS`: that step first writes a second file, named by its
  process, and sleeps.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import Artifact, Experiment, Result, StepContext, named, step
from pipeline.store import storage

SHARD = "all"
OUTPUT = "out.txt"
CHANGED = "-changed"
PAUSED = "step-001-000"  # the step that the kill and the race are about: second layer, first in it


@dataclass(frozen=True)
class Task:
    """One step of a toy graph: its name, its configuration, the names of what it reads."""

    name: str
    salt: int
    parents: tuple[str, ...]


def layered(layers: int, width: int, salt: int = 0) -> list[Task]:
    """Layers of `width` steps, each reading two of the layer before; `salt` is the first one's."""

    def name(layer: int, index: int) -> str:
        return f"step-{layer:03d}-{index % width:03d}"

    return [
        Task(
            name(layer, index),
            salt if (layer, index) == (0, 0) else 0,
            tuple(dict.fromkeys((name(layer - 1, index), name(layer - 1, index + 1))))
            if layer
            else (),
        )
        for layer in range(layers)
        for index in range(width)
    ]


SHAPES = {"2": (2, 1), "20": (4, 5), "1000": (20, 50)}


def tasks(graph: str) -> list[Task]:
    """The steps of a graph, inputs first; `20-changed` is `20` with its first step's salt changed.

    Raises:
        KeyError: for a name that is not in `SHAPES`.
    """
    layers, width = SHAPES[graph.removesuffix(CHANGED)]
    return layered(layers, width, salt=1 if graph.endswith(CHANGED) else 0)


def targets(graph: str) -> list[str]:
    return [task.name for task in tasks(graph)[-SHAPES[graph.removesuffix(CHANGED)][1] :]]


def line(name: str, salt: int, parents: Sequence[str]) -> str:
    """What a step writes, given what its parents wrote."""
    text = " ".join([name, str(salt), *parents])
    return f"{name} {salt} {hashlib.sha256(text.encode()).hexdigest()[:16]}\n"


def evaluate(graph: str) -> dict[str, str]:
    """The line of every step, computed without any engine."""
    lines: dict[str, str] = {}
    for task in tasks(graph):
        lines[task.name] = line(task.name, task.salt, [lines[p] for p in task.parents])
    return lines


class Line(Artifact):
    """One line of text."""

    @property
    def file(self) -> str:
        return storage.join(self.shard(SHARD), OUTPUT)


@step(output=Line, version=1)
def toy(
    run: StepContext, left: Line | None = None, right: Line | None = None, *, name: str, salt: int
) -> Result:
    with run.shard(SHARD) as directory:
        if marks := os.environ.get("TOY_MARKS"):
            with open(marks, "a") as file:
                file.write(name + "\n")
        if name == os.environ.get("TOY_PAUSE_STEP"):
            Path(directory, f"part-{os.getpid()}.txt").write_text("half of it")
            time.sleep(float(os.environ["TOY_PAUSE_SECONDS"]))
        texts = [Path(parent.file).read_text() for parent in (left, right) if parent is not None]
        Path(directory, OUTPUT).write_text(line(name, salt, texts))
    return {}


def build(graph: str = "20") -> tuple[Any, ...]:
    nodes: dict[str, Any] = {}
    for task in tasks(graph):
        inputs: Iterable[Any] = (nodes[parent] for parent in task.parents)
        nodes[task.name] = named(toy(*inputs, name=task.name, salt=task.salt), task.name)
    return tuple(nodes[name] for name in targets(graph))


experiment = Experiment(
    build,
    **{name + change: {"graph": name + change} for name in SHAPES for change in ("", CHANGED)},
)
