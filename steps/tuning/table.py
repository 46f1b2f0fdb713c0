"""Convert plans to rows of text, for the terminal and for a page."""

from __future__ import annotations

from typing import Any

from steps.training.plan.declared_run import DeclaredRun
from steps.training.plan.memory import GIB
from steps.tuning.candidates import MODEL, NOTHING, ROUNDING, TRAINING
from steps.tuning.choices import flags
from steps.tuning.search import Plan, Search

MEANING = {
    NOTHING: "the same output",
    ROUNDING: "the same training, gradients summed in another order",
    TRAINING: "another batch: another training",
    MODEL: "another model, with as many weights in heads of another size",
}
HEAD = (
    *("s per step", "tokens/s", "MFU", "GiB, formula", "GiB, compiler"),
    "settings that differ from the declared",
)


def rows(search: Search, run: DeclaredRun, settings: Any, most: int) -> dict[str, list[list[str]]]:
    """The cells of the fronts, by `CHANGES`, with at most `most` plans of each."""
    return {
        kind: [cells(plan, run, settings) for plan in plans[:most]]
        for kind, plans in search.fronts.items()
        if plans
    }


def cells(plan: Plan, run: DeclaredRun, settings: Any) -> list[str]:
    """The cells of one plan, with the columns of `HEAD`."""
    step = plan.step
    limit = plan.fit.limit / GIB
    formula = f"{plan.bytes / GIB:.1f}" + ("" if plan.fit.fits else f" > {limit:.2f}")
    return [
        f"{step.seconds:.4g}",
        f"{step.tokens / step.seconds:,.0f}",
        f"{step.mfu:.1%}",
        formula,
        _compiled(plan),
        " ".join(flags(plan, run, settings)) or "none",
    ]


def data(plan: Plan, run: DeclaredRun, settings: Any) -> dict[str, Any]:
    """The same plan as JSON."""
    step = plan.step
    return {
        "changes": plan.candidate.changes or "nothing",
        "flags": flags(plan, run, settings),
        "step_seconds": [step.range[0], step.seconds, step.range[1]],
        "tokens_per_second": step.tokens / step.seconds,
        "mfu_causal": step.mfu,
        "mfu_full_attention": step.mfu_full,
        "shares": step.shares,
        "formula_bytes": int(plan.bytes),
        "limit_bytes": int(plan.fit.limit),
        "fits": plan.fits,
        "compiled": None if plan.compiled is None else dict(plan.compiled),
    }


def _compiled(plan: Plan) -> str:
    found = plan.compiled
    if found is None:
        return "not compiled"
    size = found["need_gib"] if found["peak_gib"] is None else found["peak_gib"]
    if size is None:
        return "failed"
    return f"{size:.1f}" if found["fits"] else f"{size:.1f}: refused"
