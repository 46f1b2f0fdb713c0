"""The page of `ponente tune`: chosen settings, speed against memory, and the plans of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steps.pages import page
from steps.pages.charts import COLOURS, INK, figure, legend_above
from steps.training.plan.memory import GIB
from steps.tuning.search import Plan, Search
from steps.tuning.table import HEAD, MEANING
from training.cost.step_time import KINDS


def render(
    step: str,
    head: Sequence[str],
    search: Search,
    rows: Mapping[str, list[list[str]]],
    commands: Mapping[str, str],
    note: str,
) -> str:
    """The page."""
    return page.render(
        "tune",
        step=step,
        head=head,
        chosen=[(MEANING[kind], command) for kind, command in commands.items()],
        charts=[("Predicted tokens per second by memory of a device", speed_by_memory(search))],
        fronts=[(MEANING[kind], [list(HEAD), *found]) for kind, found in rows.items()],
        shares=_shares(search),
        note=note,
    )


def speed_by_memory(search: Search) -> str:
    """The SVG of the fronts, with the declared run and the memory limit."""

    def draw(axes: Any) -> None:
        fronts = [(kind, plans) for kind, plans in search.fronts.items() if plans]
        for (kind, plans), colour in zip(fronts, COLOURS, strict=False):
            x = [plan.bytes / GIB for plan in plans]
            y = [1 / plan.seconds_per_token for plan in plans]
            label = MEANING[kind].partition(",")[0].partition(":")[0]
            axes.plot(x, y, "o-", color=colour, markersize=4, label=label, alpha=0.8)
        declared = search.declared
        if declared is not None:
            at = (declared.bytes / GIB, 1 / declared.seconds_per_token)
            axes.plot(*at, "D", color=INK, markersize=6, markerfacecolor="none", label="declared")
            axes.axvline(declared.fit.limit / GIB, color=INK, linewidth=0.8, linestyle="--")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        legend_above(axes)

    return figure(draw, "tokens per second", "GiB of a device, by formula")


def _shares(search: Search) -> list[list[str]]:
    """Rows with the seconds of each part of a step, for the declared and the chosen plans."""
    plans: list[tuple[str, Plan]] = []
    if search.declared is not None:
        plans.append(("declared", search.declared))
    plans += [(MEANING[kind], plan) for kind, plan in search.chosen().items()]
    rows = [["plan", *KINDS, "s per step"]]
    for name, plan in plans:
        parts = [f"{plan.step.times[kind]:.4f}" for kind in KINDS]
        rows.append([name, *parts, f"{plan.step.seconds:.4f}"])
    return rows
