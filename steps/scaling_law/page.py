"""The page of a scaling law: its formula, predictions for budgets, charts, and the runs."""

from __future__ import annotations

from collections.abc import Sequence

from steps.pages import page
from steps.scaling_law.charts import equal_compute, loss_by_compute
from steps.scaling_law.fit import TwoVariableLaw
from steps.scaling_law.forecast import CONFIDENCE, Purchase, ScalingLaw
from steps.scaling_law.points import short

WITH = f"{CONFIDENCE:.0%}"


def render(law: ScalingLaw, bought: Sequence[Purchase], split: str) -> str:
    """The page."""
    charts = [(f"Loss on {split} by training FLOPs", loss_by_compute(law, bought))]
    if isinstance(law.fit.law, TwoVariableLaw):
        charts.append((f"Loss on {split} of each budget by size", equal_compute(law)))
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
            *("FLOPs", "times the largest run", "parameters", f"{WITH} interval", "tokens"),
            *("tokens per parameter", "loss", f"{WITH} interval"),
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
    rows = [["coefficient", "value", f"{WITH} interval"]]
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
