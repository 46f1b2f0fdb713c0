"""Charts of a scaling law: loss against compute, and against size at equal compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from steps.pages.charts import COLOURS, FAINT, INK, figure, legend_above, readable
from steps.scaling_law.fit import TwoVariableLaw
from steps.scaling_law.forecast import CONFIDENCE, Purchase, ScalingLaw
from steps.scaling_law.points import same_budget, short

_DRAWN = 40  # points of a curve


def loss_by_compute(law: ScalingLaw, bought: Sequence[Purchase]) -> str:
    """The SVG of runs, budgets, the law at each size, and its minimum over sizes with its band."""
    ends = [each.flops for each in (*law.runs, *bought)]
    best = [law.buy(each) for each in np.geomspace(min(ends), max(ends), _DRAWN)]
    spent = [each.flops for each in best]

    def draw(axes: Any) -> None:
        low, high = ([getattr(each.loss, end) for each in best] for end in ("low", "high"))
        band = {"color": FAINT, "alpha": 0.3, "linewidth": 0, "label": f"{CONFIDENCE:.0%} interval"}
        axes.fill_between(spent, low, high, **band)
        axes.plot(spent, [each.loss.value for each in best], color=INK, label="law")
        for size, colour in _sizes(law):
            own = [point for point in law.runs if point.parameters == size]
            x = np.geomspace(*_reach([point.flops for point in own]), _DRAWN)
            if isinstance(law.fit.law, TwoVariableLaw):
                axes.plot(x, law.loss_of(size, x), color=colour, linewidth=0.9, alpha=0.7)
            y = [point.loss for point in own]
            axes.plot([p.flops for p in own], y, "o", color=colour, markersize=4, label=short(size))
        values = [each.loss.value for each in bought]
        errors = [
            [each.loss.value - each.loss.low for each in bought],
            [each.loss.high - each.loss.value for each in bought],
        ]
        style = {"fmt": "D", "markersize": 5, "capsize": 3, "markerfacecolor": "none"}
        x = [each.flops for each in bought]
        axes.errorbar(x, values, np.maximum(errors, 0), color=INK, label="budgets", **style)
        axes.set_xscale("log")
        legend_above(axes)

    return figure(draw, "loss, nats per token", "training FLOPs")


def equal_compute(law: ScalingLaw) -> str:
    """The SVG of loss by size for each budget with at least two sizes: runs, law and its minimum.

    Empty if no budget has two sizes.
    """
    budgets = [g for g in same_budget(law.runs) if len({point.parameters for point in g}) > 1]
    if not budgets:
        return ""

    def draw(axes: Any) -> None:
        for number, group in enumerate(budgets):
            colour = COLOURS[number % len(COLOURS)]
            flops = float(np.exp(np.mean([np.log(point.flops) for point in group])))
            best = law.buy(flops)
            sizes = [point.parameters for point in group]
            x = np.geomspace(*_reach([*sizes, best.parameters]), _DRAWN)
            axes.plot(x, law.loss_of(x, flops), color=colour, linewidth=1.1)
            label = f"{flops:.2g} FLOPs"
            axes.plot(sizes, [p.loss for p in group], "o", color=colour, markersize=4, label=label)
            axes.plot(best.parameters, best.loss.value, "x", color=colour, markersize=6)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: readable(value))
        legend_above(axes)

    return figure(draw, "loss, nats per token", "parameters")


def _sizes(law: ScalingLaw) -> list[tuple[int, str]]:
    sizes = sorted({point.parameters for point in law.runs})
    return [(size, COLOURS[index % len(COLOURS)]) for index, size in enumerate(sizes)]


def _reach(values: Sequence[float]) -> tuple[float, float]:
    return min(values) / 1.3, max(values) * 1.3
