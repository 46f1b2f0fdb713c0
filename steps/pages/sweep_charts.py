"""Charts of a sweep's final losses: by the setting that differs, or by run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pipeline.pages.readable import flat
from steps.pages.charts import BLUE, figure, readable
from steps.pages.run_record import RunRecord

_FEWEST = 3  # runs; for two a table is enough


def final_losses(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """(caption, SVG) for every held-out split on which all runs, at least three, were scored.

    The horizontal axis is the setting that differs, if there is exactly one and it is a number;
    otherwise the chart has a line per run, with the lowest loss on top.
    """
    if len(runs) < _FEWEST:
        return []
    name, values = _varied(runs)
    captioned = []
    for split in runs[0].splits:
        if not all(split in run.splits for run in runs):
            continue
        losses = [run.scores(split)[-1]["loss"] for run in runs]
        if not all(math.isfinite(loss) for loss in losses):
            continue
        drawn = _curve(name, values, losses) if values else _dots(runs, losses)
        captioned.append((f"Final loss on {split}" + (f" by {name}" if values else ""), drawn))
    return captioned


def _varied(runs: Sequence[RunRecord]) -> tuple[str, list[float]]:
    """Name and values of the only setting that differs; empty unless all values are numbers."""
    trees = [flat(run.config) for run in runs]
    names = [
        name
        for name in dict.fromkeys(name for tree in trees for name in tree)
        if any(tree.get(name) != trees[0].get(name) for tree in trees)
    ]
    values = [tree.get(names[0]) for tree in trees] if len(names) == 1 else []
    numbers = [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return (names[0], numbers) if names and len(numbers) == len(runs) else ("", [])


def _curve(name: str, values: Sequence[float], losses: Sequence[float]) -> str:
    points = sorted(zip(values, losses, strict=True))

    def draw(axes: Any) -> None:
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=BLUE)
        if points[0][0] > 0 and points[-1][0] >= 4 * points[0][0]:
            axes.set_xscale("log")
        axes.set_xticks([x for x, _ in points], [f"{x:g}" for x, _ in points])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter(lambda value, _: readable(value))

    return figure(draw, "loss, nats per token", x_label=name)


def _dots(runs: Sequence[RunRecord], losses: Sequence[float]) -> str:
    ordered = sorted(zip(losses, (run.name for run in runs), strict=True), reverse=True)

    def draw(axes: Any) -> None:
        axes.plot([loss for loss, _ in ordered], range(len(ordered)), "o", color=BLUE)
        axes.set_yticks(range(len(ordered)), [name for _, name in ordered])

    size = (6.4, 1.2 + 0.28 * len(ordered))
    return figure(draw, "", x_label="loss, nats per token", size=size)
