"""Finish date and bill of a training on preemptible machines, for `plan`.

See `training.cost.preemption` for the simulation, `steps.training.plan.timings` for its times.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from pipeline import Hardware
from pipeline.execute.spending import dollars_an_hour, place_of, uses
from pipeline.graph.facts import Facts, Results
from pipeline.pages.readable import duration, moment
from pipeline.pages.record import runs
from steps.training.plan.continued import store_of
from steps.training.plan.cost import TPU_WAIT, prior_hours, units
from steps.training.plan.declared_run import DeclaredRun
from training.cost.preemption import Preemptions, Work, best_every, simulate

if TYPE_CHECKING:
    import numpy as np

LEAST_PREEMPTIONS = 3  # of a store's history, below which the prior is better
_DEARER = (
    "spot is dearer than on demand by the plan's mean: leave out --spot, or give your own hours "
    "between preemptions (--preemptions HOURS)"
)


def bill(run: DeclaredRun, results: Results, find: Callable[[], tuple[Work | None, str]]) -> Facts:
    """The seconds that a training is to hold its hardware; on spot simulated, with lines and data.

    With a refusal where spot was asked for and is dearer than on demand. `find` is `work_of` the
    training, which reads the store.
    """
    every = run.whole.checkpoint_every
    if not store_of(results).capacity.spot:

        def alone() -> float | None:
            work, _ = find()
            return None if work is None else work.alone(every)

        return Facts(seconds=alone)
    work, measured = find()
    if work is None:
        return Facts(("spot        known when the store has a training on this hardware",))
    if work.steps < 1:
        return Facts(("spot        no step is left",))
    preemptions, source = preemptions_of(run.hardware, results)
    data = _simulated(work, preemptions, run.hardware, every)
    data |= {"times": dataclasses.asdict(work), "measured": measured, "source": source}
    middle, why = data["held_hours"][1], _DEARER if data["dearer"] else ""
    seconds = math.inf if middle is None else 3600 * middle
    return Facts(tuple(_lines(data)), {"spot": data}, why, lambda: seconds)


def preemptions_of(hardware: Hardware, results: Results) -> tuple[Preemptions, str]:
    """When the hardware is taken away, with the source: the flag, the store's runs, or a prior."""
    capacity = store_of(results).capacity
    taken, held, waits = _history(hardware, results)
    wait = fmean(waits) if waits else TPU_WAIT if hardware.generation else 0.0
    mean, source = prior_hours(hardware)
    if taken >= LEAST_PREEMPTIONS:
        mean, source = held / taken / units(hardware), f"{taken} times in the store's runs"
    hours, source = (capacity.hours, capacity.source) if capacity.hours else ((mean,), source)
    return Preemptions(seconds=tuple(3600 * each for each in hours), wait=wait), source


def _history(hardware: Hardware, results: Results) -> tuple[int, float, list[float]]:
    """Preemptions of the kind of chip in the store's runs, unit hours held, and seconds of waits.

    Of runs on spot, and of those of which a machine was taken away.
    """
    prefix, taken, hours, waits = store_of(results).prefix, 0, 0.0, []
    for record in runs(prefix) if prefix else ():
        held = [(use, place_of(use.step.hardware)) for use in uses(record)]
        alike = [(use, units(place)) for use, place in held if place and _like(place, hardware)]
        if not record.spot and not any(use.preempted for use, _ in alike):
            continue
        taken += sum(use.preempted for use, _ in alike)
        hours += sum(use.seconds / 3600 * count for use, count in alike)
        for (use, _), (later, _) in pairwise(alike):
            if use.preempted and later.step is use.step:
                waits.append(later.began - use.until)
    return taken, hours, waits


def _like(one: Hardware, other: Hardware) -> bool:
    return one.generation == other.generation if one.generation else one == other


def _simulated(
    work: Work, preemptions: Preemptions, hardware: Hardware, every: int
) -> dict[str, Any]:
    """End and dollars as 10th, 50th and 90th percentile, if it begins now, and the best interval.

    None for what never ends. Dollars only where the hardware has a price.
    """
    best = best_every(work, preemptions)
    found = simulate(work, preemptions, [every, best])
    safe = simulate(work, Preemptions(seconds=(math.inf,), wait=0.0), [every])
    hours, held, now = _quantiles(found.total[0]), _quantiles(found.held[0]), time.time()
    means = [float(each) / 3600 for each in (*found.held.mean(axis=1), safe.held.mean())]
    data: dict[str, Any] = {
        "hours": hours,
        "ends": [None if each is None else moment(now + 3600 * each) for each in hours],
        "held_hours": held,
        "preemptions": float(found.preemptions[0].mean()),
        "hours_between": preemptions.mean / 3600,
        "wait_seconds": preemptions.wait,
        "checkpoint_every": every,
        "mean_hours": _finite(means[0]),
        "best_checkpoint_every": best,
        "best_mean_hours": _finite(means[1]),
        "dearer": False,
    }
    spot, demand = (dollars_an_hour(hardware.name, spot=each) for each in (True, False))
    if spot is not None:
        data["spot_dollars"] = [each and spot * each for each in held]
    if demand is not None:
        data["on_demand_dollars"] = [each and demand * each for each in _quantiles(safe.held[0])]
    if spot is not None and demand is not None:
        costs = spot * means[0], demand * means[2]
        data |= {"mean_dollars": [*map(_finite, costs)], "dearer": costs[0] > costs[1]}
    return data


def _lines(data: dict[str, Any]) -> list[str]:
    times = data["times"]
    costs = [
        f"{_three(data[f'{name}_dollars'], lambda amount: f'${amount:,.2f}')} {text}"
        for name, text in (("spot", "on spot"), ("on_demand", "on demand"))
        if f"{name}_dollars" in data
    ]
    now, best = (_three([data[n]], _hours) for n in ("mean_hours", "best_mean_hours"))
    lines = [
        f"{_three(data['hours'], _hours)} to the end: 10th, 50th, 90th percentile;",
        f"begun now, it ends by {_three(data['ends'], lambda end: end[:16])} UTC",
        *(["; ".join(costs)] if costs else []),
        f"{data['preemptions']:.1f} preemptions, one every {data['hours_between']:.3g} h "
        f"({data['source']});",
        f"new machines after {duration(data['wait_seconds'])}, a save {duration(times['save'])}, a "
        f"restart {duration(times['restart'])}",
        f"times: {data['measured'] or 'predicted'}",
        f"on average checkpoint_every={data['checkpoint_every']} holds the machines for {now}, the "
        f"best, {data['best_checkpoint_every']}, for {best}",
    ]
    if data["dearer"]:
        spot, demand = (_three([each], lambda d: f"${d:,.2f}") for each in data["mean_dollars"])
        lines.append(f"spot is dearer than on demand: {spot} against {demand} on average")
    keep = {"break_long_words": False, "break_on_hyphens": False}
    shown = [part for line in lines for part in wrap(line, 88, **keep)]
    return [f"{'' if index else 'spot':<12}{line}" for index, line in enumerate(shown)]


def _hours(hours: float) -> str:
    return duration(3600 * hours)


def _three(values: list[Any], text: Callable[[Any], str]) -> str:
    return ", ".join("never" if each is None else text(each) for each in values)


def _quantiles(seconds: np.ndarray) -> list[float | None]:
    """Hours at 10, 50 and 90 % of the trials."""
    ordered = sorted(seconds.tolist())
    return [_finite(ordered[int(q * (len(ordered) - 1))] / 3600) for q in (0.1, 0.5, 0.9)]


def _finite(value: float) -> float | None:
    """None for infinity, which no JSON has."""
    return float(value) if math.isfinite(value) else None
