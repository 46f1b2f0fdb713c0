"""The page of a scaling law: its formula, predictions for budgets, charts, and the runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from steps.pages import page
from steps.pages.curves import COLOURS, GREY, INK, Curve, chart
from steps.scaling_law.fit import CONFIDENCE, Purchase, ScalingLaw, TwoVariableLaw
from steps.scaling_law.points import same_budget, short

_DRAWN = 40  # points of a curve
_WITH = f"{CONFIDENCE:.0%}"


def render(law: ScalingLaw, bought: Sequence[Purchase], split: str) -> str:
    """The page."""
    charts = [(f"Loss on {split} by training FLOPs", _loss_by_compute(law, bought))]
    if isinstance(law.fit.law, TwoVariableLaw):
        charts.append((f"Loss on {split} of each budget by size", _equal_compute(law)))
    return page.render(
        "scaling",
        formula=formula(law),
        head=[
            f"{len(law.points)} of {len(law.runs)} runs",
            f"loss on {split}, nats per token",
            f"standard deviation of a run from the law {law.fit.noise:.2%}",
        ],
        why=law.why_compute,
        sentences=[sentence(law, each) for each in bought],
        budgets=_budgets(law, bought),
        charts=charts,
        coefficients=_coefficients(law),
        runs=_runs(law),
    )


def formula(law: ScalingLaw) -> str:
    """The law with its fitted coefficients, as text."""
    c = {name: f"{each.value:.4g}" for name, each in law.coefficients().items()}
    if isinstance(law.fit.law, TwoVariableLaw):
        return f"L(N, D) = {c['E']} + {c['A']} / N^{c['alpha']} + {c['B']} / D^{c['beta']}"
    return f"L(C) = {c['K']} / C^{c['gamma']}, a power law in compute"


def sentence(law: ScalingLaw, bought: Purchase) -> str:
    """A sentence about the best run of a budget, compared with the best of the runs."""
    loss = bought.loss
    gain = min(point.loss for point in law.runs) - loss.value
    more = f"{bought.flops / law.largest:.3g}"
    side = "below" if gain >= 0 else "above"
    return (
        f"{bought.flops:.3g} FLOPs, {more} times the largest run, buy a loss of "
        f"{loss.value:.3f} ({loss.low:.3f} to {loss.high:.3f}), {abs(gain):.3f} {side} the best: "
        f"{short(bought.parameters)} parameters on {short(bought.tokens)} tokens"
    )


def _budgets(law: ScalingLaw, bought: Sequence[Purchase]) -> list[list[str]]:
    rows = [
        [
            *("FLOPs", "times the largest run", "parameters", f"{_WITH} interval", "tokens"),
            *("tokens per parameter", "loss", f"{_WITH} interval"),
        ]
    ]
    for each in bought:
        between = [short(size) for size in each.between or ()]
        rows.append(
            [
                f"{each.flops:.3g}",
                f"{each.flops / law.largest:.3g}",
                short(each.parameters),
                " to ".join(between) or "on the runs' line",
                short(each.tokens),
                f"{each.tokens / each.parameters:.3g}",
                f"{each.loss.value:.3f}",
                f"{each.loss.low:.3f} to {each.loss.high:.3f}",
            ]
        )
    return rows


def _coefficients(law: ScalingLaw) -> list[list[str]]:
    rows = [["coefficient", "value", f"{_WITH} interval"]]
    for name, each in law.coefficients().items():
        rows.append([name, f"{each.value:.4g}", f"{each.low:.4g} to {each.high:.4g}"])
    return rows


def _runs(law: ScalingLaw) -> list[list[str]]:
    rows = [["run", "parameters", "tokens", "FLOPs", "loss", "law", "residual"]]
    fitted = {id(point): each for point, each in zip(law.points, law.fit.fitted, strict=True)}
    for point in law.runs:
        by_law = fitted.get(id(point))
        rows.append(
            [
                point.name,
                f"{point.parameters:,}",
                f"{point.tokens:,}",
                f"{point.flops:.3g}",
                f"{point.loss:.4f}",
                "-" if by_law is None else f"{by_law:.4f}",
                "-" if by_law is None else f"{point.loss / by_law - 1:+.2%}",
            ]
        )
    return rows


def _loss_by_compute(law: ScalingLaw, bought: Sequence[Purchase]) -> Markup:
    """The chart of runs, budgets, the law at each size, and its least loss with an interval."""
    ends = [each.flops for each in (*law.runs, *bought)]
    best = [law.buy(each) for each in np.geomspace(min(ends), max(ends), _DRAWN)]
    spent, losses = [each.flops for each in best], [each.loss for each in best]
    low, high = [each.low for each in losses], [each.high for each in losses]
    curves = [
        Curve(f"{CONFIDENCE:.0%} interval", spent, low, GREY, "band", high=high),
        Curve("law", spent, [each.value for each in losses], INK),
    ]
    sizes = sorted({point.parameters for point in law.runs})
    for size, colour in zip(sizes, itertools.cycle(COLOURS)):
        own = [point for point in law.runs if point.parameters == size]
        if isinstance(law.fit.law, TwoVariableLaw):
            x = np.geomspace(*_reach([point.flops for point in own]), _DRAWN).tolist()
            y = np.asarray(law.loss_of(size, np.asarray(x))).tolist()
            curves.append(Curve(f"law at {short(size)}", x, y, colour, listed=False))
        x, y = [point.flops for point in own], [point.loss for point in own]
        curves.append(Curve(short(size), x, y, colour, "points"))
    x, y = [each.flops for each in bought], [each.loss.value for each in bought]
    curves.append(Curve("budgets", x, y, COLOURS[-1], "points"))
    return chart(curves, "nats per token", "training FLOPs", logarithmic="x")


def _equal_compute(law: ScalingLaw) -> Markup:
    """The chart of loss by size for each budget with two sizes or more; empty without one."""
    groups = [g for g in same_budget(law.runs) if len({point.parameters for point in g}) > 1]
    curves = []
    for group, colour in zip(groups, itertools.cycle(COLOURS)):
        flops = float(np.exp(np.mean([np.log(point.flops) for point in group])))
        best, name = law.buy(flops), f"{flops:.2g} FLOPs"
        sizes = [point.parameters for point in group]
        x = np.geomspace(*_reach([*sizes, best.parameters]), _DRAWN)
        y = np.asarray(law.loss_of(x, flops)).tolist()
        curves += [
            Curve(f"law of {name}", x.tolist(), y, colour, listed=False),
            Curve(name, sizes, [point.loss for point in group], colour, "points"),
            Curve("minimum", [best.parameters], [best.loss.value], INK, "points"),
        ]
    return chart(curves, "nats per token", "parameters", logarithmic="x")


def _reach(values: Sequence[float]) -> tuple[float, float]:
    return min(values) / 1.3, max(values) * 1.3
