"""Predicted time and cost of a whole run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline import Hardware
from pipeline.accelerators import Chip
from pipeline.prices import Price, price_of
from steps.training.plan.declared_run import DeclaredRun
from training.config import TrainConfig
from training.cost.memory_estimate import optimizer_bytes
from training.cost.resolved_run import ResolvedPhase, ResolvedRun
from training.cost.step_time import Forecast, forecast

START_SECONDS = 120.0
"""From the start of the hosts to the first step; published logs have 40 s until the devices are
ready and 20 to 60 s of compilation."""
SAVE_BYTES = 32e9
"""Bytes per second from a chip to its host; a checkpoint blocks the steps for this copy (Orbax's
guide)."""
TPU_HOURS, TPU_WAIT = 16.1, 11 * 60.0
"""Mean hours between the preemptions of a spot slice, and seconds until there is a new one: 42
preemptions of 7 slices (v2-8 to v3-32) in 677 hours, github.com/skypilot-org/skypilot/pull/1500,
December 2022. No rate of later generations is published."""
GPU_HOURS = 12.0
"""The same of a host with GPUs: an assumption."""
Bills = dict[str, list[float]]
Ends = tuple[float, float, float]


@dataclass(frozen=True)
class RunTime:
    """Predicted seconds of a run, by activity."""

    steps: float
    start: float
    checkpoints: float
    evaluations: float

    @property
    def total(self) -> float:
        return self.steps + self.start + self.checkpoints + self.evaluations


def units(hardware: Hardware) -> int:
    """What is preempted at once: slices, hosts with GPUs, or this machine."""
    return hardware.processes if hardware.kind == "gpu" else hardware.slices


def prior_hours(hardware: Hardware) -> tuple[float, str]:
    """Mean hours between the preemptions of all its `units`, and the source of this figure."""
    if hardware.kind == "tpu":
        source = "TPU slices of 2022, github.com/skypilot-org/skypilot/pull/1500"
        return TPU_HOURS / units(hardware), source
    return GPU_HOURS / units(hardware), "an assumption"


def checkpoint_bytes(run: DeclaredRun | ResolvedPhase) -> float:
    """Bytes of one checkpoint: float32 parameters, their average, and the optimizer's state."""
    average = run.train.ema or run.train.average_last
    parameters = (8 if average else 4) * run.model.parameter_count
    return parameters + optimizer_bytes(run.model, run.optimizer)


def ends(step: Forecast) -> Ends:
    """Seconds of a step at the fast end of its interval, in the middle and at the slow end."""
    return step.range[0], step.seconds, step.range[1]


def save_seconds(run: DeclaredRun) -> float:
    return checkpoint_bytes(run) / run.hardware.chips / SAVE_BYTES


def run_time(run: DeclaredRun, train: TrainConfig, step: Forecast, seconds: float) -> RunTime:
    """The times of the steps that are left, if a step takes `seconds`."""
    assert run.steps is not None
    whole = run.whole
    saves = _count(run, whole.checkpoint_every, whole.keep_every, others=whole.milestones)
    evaluated = _count(run, whole.evaluate_every) + (not run.done)  # also before the first step
    batches = 0 if train.evaluate_batches == "all" else int(train.evaluate_batches)
    useful = step.seconds - step.times["update"] - step.times["fixed"]
    steps = (run.steps - run.done) * seconds
    checkpoints = saves * save_seconds(run)
    # A forward pass is a third of a step, whose backward pass costs twice as much.
    evaluations = evaluated * batches * run.splits * useful / 3
    return RunTime(steps, START_SECONDS, checkpoints, evaluations)


def phases_share(run: DeclaredRun, resolved: ResolvedRun, step: Forecast, chip: Chip) -> float:
    """The mean seconds of the steps that are left over those of the largest step, by the table."""
    total, count = 0.0, 0
    for each in resolved.phases:
        steps = each.phase.end - max(each.phase.first, run.done)
        total, count = total + steps * forecast(each, chip).seconds, count + steps
    return total / max(count, 1) / step.seconds


def run_times(
    run: DeclaredRun,
    resolved: ResolvedRun,
    step: Forecast,
    chip: Chip,
    learned: Forecast | None = None,
) -> list[RunTime]:
    """The run's times at the `ends` of the largest step's forecast.

    `step` is by the table, as those of the other phases; `learned` its correction by runs.
    """
    share, train = phases_share(run, resolved, step, chip), resolved.largest.train
    step = learned or step
    return [run_time(run, train, step, share * each) for each in ends(step)]


def _count(run: DeclaredRun, *every: int, others: Sequence[int] = ()) -> int:
    """Steps left that are multiples of an interval (none of 0), or among `others`, or the last."""
    last = run.steps or 0
    multiples = (range(each, last + 1, each) for each in every if each)
    return sum(run.done < step <= last for step in {last, *others}.union(*multiples))


def bills(hardware: Hardware, price: Price | None, times: Sequence[RunTime]) -> Bills:
    """Dollars of a run of each time before preemptions, by "on_demand" and "spot"."""
    found: Bills = {}
    for how in ("on_demand", "spot"):
        if (rate := getattr(price, how, None)) is not None:
            found[how] = [rate * hardware.chips * each.total / 3600 for each in times]
    return found


def money(run: DeclaredRun, chip: Chip, times: tuple[RunTime, RunTime]) -> str:
    """Dollars on demand and on spot, as ranges, or where to give a missing price."""
    price = price_of(chip.name)
    found = bills(run.hardware, price, times)
    if price is None or not found:
        return f"no public price of {chip.name}: give one in a file that PONENTE_PRICES names"
    words = {"on_demand": "on demand", "spot": "on spot before preemptions"}
    amounts = [f"${low:,.2f} to ${high:,.2f} {words[how]}" for how, (low, high) in found.items()]
    return f"{', '.join(amounts)} ({price.source}, {price.date})"
