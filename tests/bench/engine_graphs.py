"""The toy graphs both engines run, and the body of a toy step; standard library only.

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
from collections.abc import Sequence
from dataclasses import dataclass

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
    """Names of the last layer."""
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


def perform(name: str, salt: int, parents: Sequence[str], directory: str) -> None:
    """The body of a toy step.

    Args:
        name, salt: of the task.
        parents: paths of the files its parents wrote.
        directory: where to write; made if it is not there.
    """
    if marks := os.environ.get("TOY_MARKS"):
        with open(marks, "a") as file:
            file.write(name + "\n")
    os.makedirs(directory, exist_ok=True)
    if name == os.environ.get("TOY_PAUSE_STEP"):
        with open(os.path.join(directory, f"part-{os.getpid()}.txt"), "w") as file:
            file.write("half of it")
        time.sleep(float(os.environ["TOY_PAUSE_SECONDS"]))
    texts = []
    for path in parents:
        with open(path) as file:
            texts.append(file.read())
    with open(os.path.join(directory, OUTPUT), "w") as file:
        file.write(line(name, salt, texts))
