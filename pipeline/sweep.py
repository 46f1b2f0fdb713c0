"""Sweeps as part of a graph: a step built once per value of a setting, and the best of them.

    models = sweep(lambda size: train(sequences, model, optimizer, TrainConfig(...)), [8, 16])
    best = select(models, by="last.loss")

Every candidate is a separate step with its own cached output: adding a value trains one more model.
The selected output is not a copy: it refers to the winner's files, opens the winner's inputs, and
has the candidates' type for a type checker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, cast

from pipeline.errors import InputError
from pipeline.graph.artifact import Artifact
from pipeline.graph.node import as_node, named
from pipeline.graph.step import step
from pipeline.graph.step_context import Reference, StepContext

A = TypeVar("A", bound=Artifact)
V = TypeVar("V")


def sweep(build: Callable[[V], A], over: Iterable[V] | Mapping[str, V]) -> tuple[A, ...]:
    """`build(value)` for each value, labelled with the value or with its name in a mapping.

    Raises:
        InputError: for no values, and for a value that is given twice.
    """
    values = over.items() if isinstance(over, Mapping) else [(str(value), value) for value in over]
    if not values:
        raise InputError("sweep(over=...): expected at least one value, found none")
    names = [name for name, _ in values]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"sweep(over=...): {twice} is given twice; give each value once")
    built = []
    for name, value in values:
        artifact = build(cast(V, value))
        built.append(named(artifact, f"{as_node(artifact).label}[{name}]"))
    return tuple(built)


def select(candidates: tuple[A, ...], *, by: str, mode: Literal["min", "max"] = "min") -> A:
    """The candidate whose result has the smallest (or largest) number at the dotted path `by`.

    Among equal numbers the first candidate wins. If a candidate has no such number, the step fails
    with an `InputError` that lists the paths it has.
    """
    if mode not in ("min", "max"):
        raise InputError(f"select(mode=...): expected 'min' or 'max', got {mode!r}")
    chosen = selection(candidates, by=by, mode=mode)
    node = as_node(chosen)
    kinds = {as_node(candidate).output for candidate in candidates}
    if len(kinds) != 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InputError(f"select(candidates=...): expected outputs of one class, got {names}")
    node.output = kinds.pop()
    return cast(A, chosen)


@step(output=Artifact, version=1, name="select", cpus=0)
def selection(run: StepContext, candidates: tuple[Artifact, ...], *, by: str, mode: str) -> Any:
    """The step behind `select`."""
    del run
    values = [_number(candidate, by) for candidate in candidates]
    best = values.index(min(values) if mode == "min" else max(values))
    winner = candidates[best]
    table = [
        {"step": c.manifest.label, "value": value}
        for c, value in zip(candidates, values, strict=True)
    ]
    result = {**winner.result, "selected": {"index": best, "by": by, "mode": mode}}
    headline = f"best by {by}: {winner.manifest.label} ({values[best]:g})"
    return Reference(
        winner,
        "selected",
        {
            **result,
            "measured": {**winner.result.get("measured", {}), "candidates": table},
            "headline": [headline],
        },
    )


def _number(artifact: Artifact, by: str) -> float:
    value: Any = artifact.result
    for part in by.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    # `value != value` is true for NaN alone, which would make the minimum depend on the order.
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        there = ", ".join(_paths(artifact.result)) or "no numbers"
        raise InputError(
            f"select(by={by!r}): {artifact.manifest.label} has {value!r} there; it has {there}"
        )
    return value


def _paths(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found += _paths(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            found.append(prefix + name)
    return found
