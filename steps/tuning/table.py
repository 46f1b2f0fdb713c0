"""Plans as flags of their experiment, as rows of text, as JSON and as a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from models.shape.config import TransformerConfig
from steps.pages import page
from steps.pages.curves import COLOURS, GREY, INK, Curve, chart
from steps.training.plan.declared_run import DeclaredRun
from steps.training.plan.memory import GIB
from steps.tuning.search import MODEL, NOTHING, ROUNDING, TRAINING, Plan, Search
from training.config import TrainConfig
from training.cost.step_time import KINDS

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


def flags(plan: Plan, run: DeclaredRun, settings: Any) -> list[str]:
    """The command-line words that change the declared run to the plan: --flag, value, ...

    Flags are named after the fields of the experiment's `settings`.
    """
    return [
        word
        for name, value in _differences(plan, run, settings)
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def _differences(plan: Plan, run: DeclaredRun, settings: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every setting that differs from the declared run."""
    training = _field(settings, TrainConfig) or "training"
    model = _field(settings, TransformerConfig) or "model"
    new, old = plan.fit.train, run.train
    yield from _changed(training, ("batch_size", "microbatches", "remat"), new, old)
    parallel = f"{training}.parallel"
    yield from _changed(parallel, ("sharding", "sequence", "tensor"), new.parallel, old.parallel)
    if new.parallel.optimizer_memory == "host" != old.parallel.optimizer_memory:
        yield f"{parallel}.optimizer_memory", "host"
    yield from _changed(model, ("heads", "kv_heads", "head_size"), plan.candidate.model, run.model)


def _changed(prefix: str, names: tuple[str, ...], new: Any, old: Any) -> Iterator[tuple[str, Any]]:
    for name in names:
        if (value := getattr(new, name)) != getattr(old, name):
            yield f"{prefix}.{name}", value


def _field(settings: Any, kind: type) -> str | None:
    """Name of the only setting of a type; None if there are none or several."""
    names = [f.name for f in dataclasses.fields(settings)]
    names = [name for name in names if isinstance(getattr(settings, name), kind)]
    return names[0] if len(names) == 1 else None


def rows(search: Search, run: DeclaredRun, settings: Any, most: int) -> dict[str, list[list[str]]]:
    """The cells of the fronts, by `CHANGES`, with at most `most` plans of each."""
    return {
        kind: [cells(plan, run, settings) for plan in plans[:most]]
        for kind, plans in search.fronts.items()
        if plans
    }


def cells(plan: Plan, run: DeclaredRun, settings: Any) -> list[str]:
    """The cells of one plan, with the columns of `HEAD`."""
    step, compiled = plan.step, "not compiled"
    if (found := plan.compiled) is not None:
        size = found["need_gib"] if found["peak_gib"] is None else found["peak_gib"]
        refused = "" if found["fits"] else ": refused"
        compiled = "failed" if size is None else f"{size:.1f}{refused}"
    over = "" if plan.fit.fits else f" > {plan.fit.limit / GIB:.2f}"
    return [
        f"{step.seconds:.4g}",
        f"{step.tokens / step.seconds:,.0f}",
        f"{step.mfu:.1%}",
        f"{plan.bytes / GIB:.1f}{over}",
        compiled,
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


def render(
    step: str,
    head: Sequence[str],
    search: Search,
    rows: Mapping[str, list[list[str]]],
    commands: Mapping[str, str],
    note: str,
) -> str:
    """The page: chosen settings, speed against memory, and the plans of each kind."""
    return page.render(
        "tune",
        step=step,
        head=head,
        chosen=[(MEANING[kind], command) for kind, command in commands.items()],
        charts=[("Predicted tokens per second by memory of a device", _speed_by_memory(search))],
        fronts=[(MEANING[kind], [list(HEAD), *found]) for kind, found in rows.items()],
        shares=_shares(search),
        note=note,
    )


def _speed_by_memory(search: Search) -> Markup:
    """The chart of the fronts, with the declared run and the memory limit."""
    curves = []
    fronts = [(kind, plans) for kind, plans in search.fronts.items() if plans]
    for (kind, plans), colour in zip(fronts, COLOURS, strict=False):
        speeds = [1 / plan.seconds_per_token for plan in plans]
        label = MEANING[kind].partition(",")[0].partition(":")[0]
        curves.append(Curve(label, [plan.bytes / GIB for plan in plans], speeds, colour, "dots"))
    declared = search.declared
    if declared is not None:
        speed = 1 / declared.seconds_per_token
        curves.append(Curve("declared", [declared.bytes / GIB], [speed], INK, "points"))
        curves.append(Curve("limit", [declared.fit.limit / GIB], (), GREY, "rule"))
    return chart(curves, "tokens per second", "GiB of a device, by formula", from_zero="xy")


def _shares(search: Search) -> list[list[str]]:
    """Rows with the seconds of each part of a step, for the declared and the chosen plans."""
    plans = {"declared": search.declared} if search.declared else {}
    plans |= {MEANING[kind]: plan for kind, plan in search.chosen().items()}
    return [
        ["plan", *KINDS, "s per step"],
        *(
            [name, *(f"{p.step.times[kind]:.4f}" for kind in KINDS), f"{p.step.seconds:.4f}"]
            for name, p in plans.items()
        ),
    ]
