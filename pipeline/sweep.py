"""Sweeps as part of a graph: a step built once per value of a setting, and the best of them.

    models = sweep(lambda size: train(sequences, model, optimizer, TrainConfig(...)), [8, 16])
    best = select(models, by="last.loss")

Every candidate is a separate step with its own cached output: adding a value trains one more model.
The selected output is not a copy: it refers to the winner's files, opens the winner's inputs, and
has the candidates' type for a type checker.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pipeline.errors import InputError, PonenteError
from pipeline.graph.artifact import Artifact
from pipeline.graph.order import is_display_name, named
from pipeline.graph.step import as_node, step
from pipeline.graph.step_context import Reference, StepContext
from pipeline.identity.fingerprint import Runtime
from pipeline.store.manifest import label_of

A = TypeVar("A", bound=Artifact)
V = TypeVar("V")


def sweep(build: Callable[[V], A], over: Iterable[V] | Mapping[str, V]) -> tuple[A, ...]:
    """`build(value)` for each value, labelled with the value or with its name in a mapping.

    Configurations are labelled with the fields that differ, paths with their ends, and other values
    that are no label with their number.
    """
    values = list(over.values()) if isinstance(over, Mapping) else list(over)
    if not values:
        raise InputError("sweep(over=...): expected at least one value, found none")
    named_by = list(over) if isinstance(over, Mapping) else [str(value) for value in values]
    if twice := next((name for name in named_by if named_by.count(name) > 1), None):
        raise InputError(f"sweep(over=...): {twice} is given twice; give each value once")
    built = [build(cast(V, value)) for value in values]
    names = named_by if isinstance(over, Mapping) else _names(values, built)
    labels = [as_node(artifact).label for artifact in built]
    return tuple(
        named(artifact, f"{label}[{name}]")
        for artifact, label, name in zip(built, labels, names, strict=True)
    )


def _names(values: list[Any], built: Iterable[Artifact]) -> list[str]:
    """A name for each value, fit for the label of what was built from it."""
    texts = [str(value) for value in values]
    if all(dataclasses.is_dataclass(value) for value in values):
        texts = _differing(values)
    elif any({"/", "\\"} & set(text) for text in texts):
        parts = [re.split(r"[/\\]+", text.rstrip("/\\")) for text in texts]
        ends = [[":".join(p[-depth:]) for p in parts] for depth in range(1, max(map(len, parts)))]
        texts = next((texts for texts in ends if len(set(texts)) == len(texts)), texts)
    labels = [as_node(artifact).label for artifact in built]
    fit = all(is_display_name(f"{a}[{b}]") for a, b in zip(labels, texts, strict=True))
    if fit and len(set(texts)) == len(texts):
        return texts
    return [str(number) for number in range(1, len(values) + 1)]


def _differing(values: list[Any]) -> list[str]:
    """The fields of configurations that have not the same value in all, as text."""
    trees = [dict(_fields(value)) for value in values]
    names = dict.fromkeys(name for tree in trees for name in tree)
    varied = [name for name in names if len({repr(tree.get(name)) for tree in trees}) > 1]
    return [", ".join(f"{n.rpartition('.')[2]}={t[n]}" for n in varied if n in t) for t in trees]


def _fields(config: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _fields(value, f"{before}{field.name}.")
        else:
            yield before + field.name, value


def select(candidates: tuple[A, ...], *, by: str, mode: Literal["min", "max"] = "min") -> A:
    """The candidate whose result has the smallest (or largest) number at the dotted path `by`.

    Among equal numbers the first candidate wins. If a candidate has no such number, the step fails
    with an `InputError` that lists the paths it has.
    """
    if mode not in ("min", "max"):
        raise InputError(f"select(mode=...): expected 'min' or 'max', got {mode!r}")
    kinds = {as_node(candidate).output for candidate in candidates}
    if len(kinds) != 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InputError(f"select(candidates=...): expected outputs of one class, got {names}")
    (kind,) = kinds
    chosen = selection(candidates, by=by, mode=mode, kind=kind)
    as_node(chosen).output = kind
    return cast(A, chosen)


@step(output=Artifact, version=1, name="select", cpus=0)
def selection(
    run: StepContext,
    candidates: tuple[Artifact, ...],
    *,
    by: str,
    mode: str,
    kind: Annotated[type[Artifact], Runtime] = Artifact,
) -> Any:
    """The step behind `select`, for candidates of the class `kind`."""
    del run
    values = [_number(candidate, by) for candidate in candidates]
    best = values.index(min(values) if mode == "min" else max(values))
    winner = candidates[best]
    opened = [kind(candidate.path, candidate.manifest) for candidate in candidates]
    try:
        compared, certain = kind.compared(opened, by, best)
    except (PonenteError, OSError) as error:  # the choice needs only what is known already
        compared, certain = Artifact.compared(opened, by, best)
        certain = f"how certain this is could not be read ({error})"
    table = [
        {"step": c.manifest.label, "value": value, **more}
        for c, value, more in zip(candidates, values, compared, strict=True)
    ]
    headline = f"best by {by}: {label_of(winner.manifest)} ({values[best]:g})"
    result = {
        **winner.result,
        "selected": {"index": best, "by": by, "mode": mode},
        "measured": {**winner.result.get("measured", {}), "candidates": table},
        "headline": [f"{headline}; {certain}" if certain else headline],
    }
    return Reference(winner, "selected", result)


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
