"""Finish date and bill of a training on preemptible machines, simulated for `plan`.

See `training.cost.preemption` for the simulation, `steps.training.plan.timings` for its times.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
import time
from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pipeline import Hardware
from pipeline.accelerators import Chip
from pipeline.execute.spending import dollars_an_hour, uses
from pipeline.graph.capacity import Capacity
from pipeline.graph.facts import Facts, Published, Results
from pipeline.graph.hardware import pod
from pipeline.graph.step import Node
from pipeline.pages.readable import duration
from pipeline.pages.record import runs
from steps.training.plan.cost import TPU_WAIT, prior_hours, units
from steps.training.plan.declared_run import DeclaredRun
from steps.training.plan.timings import work_of
from training.cost.preemption import Preemptions, Work, best_every, simulate

if TYPE_CHECKING:
    import numpy as np

LEAST_PREEMPTIONS = 3  # of a store's history, below which the prior is better
_SHARES = (0.1, 0.5, 0.9)
_IN = " " * 12


def bill(
    node: Node,
    run: DeclaredRun,
    results: Results,
    devices: int,
    chip: Chip | None = None,
    predicted: Work | None = None,
) -> Facts:
    """The seconds that a training is to hold its hardware; on spot simulated, with lines and data.

    A refusal where spot was asked for and is dearer than on demand. No facts where no time is
    `predicted` or measured.
    """
    every = run.whole.checkpoint_every
    if not _capacity(results).spot:

        def alone() -> float | None:
            work, _ = work_of(node, run, results, predicted, chip, devices)
            return None if work is None else work.alone(every)

        return Facts(seconds=alone)
    work, measured = work_of(node, run, results, predicted, chip, devices)
    if work is None or not work.steps:
        return Facts(("spot        not known: no training on this hardware is in the store",))
    lines, data = _simulated(work, measured, run.hardware, every, results)
    why, middle = "", data["held_hours"][1]
    if data.get("dearer"):
        why = "spot is dearer than on demand by the plan's mean: leave out --spot, or give your "
        why += "own hours between preemptions (--preemptions HOURS)"
    seconds = math.inf if middle is None else 3600 * middle
    return Facts(tuple(lines), {"spot": data}, why, lambda: seconds)


def _capacity(results: Results) -> Capacity:
    return results.capacity if isinstance(results, Published) else Capacity()


def preemptions_of(hardware: Hardware, results: Results) -> tuple[Preemptions, str]:
    """When the hardware is taken away, with the source: the flag, the store's runs, or a prior."""
    capacity = _capacity(results)
    taken, hours, waits = _history(hardware, results)
    wait = fmean(waits) if waits else TPU_WAIT if hardware.generation else 0.0
    if capacity.hours:
        given, source = capacity.hours, capacity.source
    elif taken >= LEAST_PREEMPTIONS:
        given = (hours / taken / units(hardware),)
        source = f"{taken} times in {hours:,.0f} h of this store's runs"
    else:
        mean, source = prior_hours(hardware)
        given = (mean,)
    return Preemptions(seconds=tuple(3600 * each for each in given), wait=wait), source


def _history(hardware: Hardware, results: Results) -> tuple[int, float, list[float]]:
    """Preemptions of the kind of chip in the store's runs, unit hours held, and seconds of waits.

    Of runs on spot, and of those of which a machine was taken away.
    """
    prefix, taken, hours, waits = getattr(results, "prefix", ""), 0, 0.0, []
    for record in runs(prefix) if prefix else ():
        held = [use for use in uses(record) if _like(use.step.hardware, hardware)]
        if not record.spot and not any(use.preempted for use in held):
            continue
        for use, later in zip(held, [*held[1:], None], strict=True):
            taken += use.preempted
            hours += use.seconds / 3600 * units(pod(use.step.hardware))
            if use.preempted and later is not None and later.step is use.step:
                waits.append(later.began - use.until)
    return taken, hours, waits


def _like(name: str, hardware: Hardware) -> bool:
    if not name or not hardware.generation:
        return bool(name) and name == hardware.name
    return name.rpartition("x")[2].partition("-")[0] == hardware.generation


def _simulated(
    work: Work, measured: str, hardware: Hardware, every: int, results: Results
) -> tuple[list[str], dict[str, Any]]:
    """Lines and data: end, dollars and the best interval, if the training begins now.

    Dollars only where the hardware has both prices; `every` is the interval in steps.
    """
    preemptions, source = preemptions_of(hardware, results)
    best = best_every(work, preemptions)
    found = simulate(work, preemptions, [every, best])
    never = Preemptions(seconds=(math.inf,), wait=0.0)
    safe = simulate(work, never, [every])
    spot, demand = (dollars_an_hour(hardware.name, spot=each) for each in (True, False))
    mean = [float(each) / 3600 for each in found.held.mean(axis=1)]
    hours, paid = _quantiles(found.total[0]), _quantiles(found.held[0])
    now = time.time()
    ends = [None if each is None else now + 3600 * each for each in hours]
    data: dict[str, Any] = {
        "hours": hours,
        "ends": [each and time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(each)) for each in ends],
        "held_hours": paid,
        "preemptions": float(found.preemptions[0].mean()),
        "hours_between": preemptions.mean / 3600,
        "source": source,
        "wait_seconds": preemptions.wait,
        "times": dataclasses.asdict(work),
        "measured": measured,
        "checkpoint_every": every,
        "best_checkpoint_every": best,
        "held_hours_mean": [each if math.isfinite(each) else None for each in mean],
    }
    moments = ", ".join(
        "never" if each is None else time.strftime("%a %d %b %H:%M", time.gmtime(each))
        for each in ends
    )
    lines = [
        f"spot        {_three([h and 3600 * h for h in hours], duration)} to the end: 10th, 50th, "
        f"90th percentile;",
        f"{_IN}begun now, it ends by {moments} UTC",
        f"{_IN}with {data['preemptions']:.1f} preemptions, one every "
        f"{preemptions.mean / 3600:,.3g} h ({source})",
    ]
    if spot is not None:
        data["dollars"] = [None if each is None else spot * each for each in paid]
        line = f"{_IN}{_three(data['dollars'], _money)} on spot"
        if demand is not None:
            data["on_demand_dollars"] = [demand * (h or 0.0) for h in _quantiles(safe.held[0])]
            line += f"; {_three(data['on_demand_dollars'], _money)} on demand"
        lines.append(line)
    indent = {"initial_indent": _IN, "subsequent_indent": _IN}
    lines += [
        f"{_IN}new machines after {duration(preemptions.wait)}, a save {duration(work.save)}, "
        f"a restart {duration(work.restart)}",
        *textwrap.wrap(f"times: {measured or 'predicted'}", 100, **indent),
        _interval(every, best, mean, spot),
    ]
    if spot is not None and demand is not None:
        amounts = spot * mean[0], demand * float(safe.held.mean()) / 3600
        data["dearer"] = amounts[0] > amounts[1]
        if data["dearer"]:
            lines.append(
                f"{_IN}spot is dearer than on demand: {_money(amounts[0])} against "
                f"{_money(amounts[1])} on average"
            )
    return lines, data


def _interval(every: int, best: int, mean: list[float], rate: float | None) -> str:
    now, least = (duration(3600 * h) if rate is None else _money(rate * h) for h in mean)
    line = f"{_IN}checkpoint_every {every:,} takes {now} on average"
    return f"{line}; {best:,} takes least, {least}" if mean[1] < mean[0] else f"{line}, the least"


def _quantiles(seconds: np.ndarray) -> list[float | None]:
    """Hours of the `_SHARES` of trials; None for infinity, which no JSON has."""
    ordered = sorted(seconds.tolist())
    found = [ordered[int(share * (len(ordered) - 1))] / 3600 for share in _SHARES]
    return [each if math.isfinite(each) else None for each in found]


def _three(values: list[Any], text: Callable[[float], str]) -> str:
    return ", ".join("never" if each is None else text(each) for each in values)


def _money(amount: float) -> str:
    return f"${amount:,.2f}"
