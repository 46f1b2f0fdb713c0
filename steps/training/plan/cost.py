"""Predicted time and cost of a whole run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.accelerators import Chip
from pipeline.prices import price_of
from steps.training.plan.declared_run import DeclaredRun
from training.config import TrainConfig
from training.cost.memory_estimate import optimizer_bytes
from training.cost.resolved_run import ResolvedPhase
from training.cost.step_time import Forecast

START_SECONDS = 120.0
"""From the start of the hosts to the first step; published logs have 40 s until the devices are
ready and 20 to 60 s of compilation."""
SAVE_BYTES = 32e9
"""Bytes per second from a chip to its host; a checkpoint blocks the steps for this copy (Orbax's
guide)."""
PREEMPTIONS_A_DAY = 2.0
"""An assumption for spot slices, since no rate is published."""


@dataclass(frozen=True)
class RunTime:
    """Predicted seconds of a run, by activity."""

    steps: float
    start: float
    checkpoints: float
    evaluations: float
    preemptions: float

    @property
    def total(self) -> float:
        """Seconds on demand; on spot, `preemptions` are added."""
        return self.steps + self.start + self.checkpoints + self.evaluations


def checkpoint_bytes(run: DeclaredRun | ResolvedPhase) -> float:
    """Bytes of one checkpoint: float32 parameters, their average, and the optimizer's state."""
    average = run.train.ema or run.train.average_last
    parameters = (8 if average else 4) * run.model.parameter_count
    return parameters + optimizer_bytes(run.model, run.optimizer)


def run_time(run: DeclaredRun, train: TrainConfig, step: Forecast, seconds: float) -> RunTime:
    """The times of the steps that are left, if a step takes `seconds`."""
    assert run.steps is not None
    saves = _count(run, run.whole.checkpoint_every, run.whole.keep_every, run.whole.milestones)
    evaluated = _count(run, run.whole.evaluate_every) + (not run.done)  # also before the first step
    batches = 0 if train.evaluate_batches == "all" else int(train.evaluate_batches)
    useful = step.seconds - step.times["update"] - step.times["fixed"]
    steps = (run.steps - run.done) * seconds
    checkpoints = saves * checkpoint_bytes(run) / run.hardware.devices / SAVE_BYTES
    # A forward pass is a third of a step, whose backward pass costs twice as much.
    evaluations = evaluated * batches * run.splits * useful / 3
    whole = steps + START_SECONDS + checkpoints + evaluations
    # A preemption costs a start and, on average, half of the steps between two checkpoints.
    lost = START_SECONDS + train.checkpoint_every / 2 * seconds
    preemptions = whole / 86400 * PREEMPTIONS_A_DAY * lost
    return RunTime(steps, START_SECONDS, checkpoints, evaluations, preemptions)


def _count(run: DeclaredRun, every: int, also_every: int = 0, others: Sequence[int] = ()) -> int:
    """Steps left that are multiples of an interval, or among `others`, or the last one."""
    first, last = run.done, run.steps or 0

    def multiples(interval: int) -> int:
        return last // interval - first // interval

    found = multiples(every)
    if also_every:
        found += multiples(also_every) - multiples(math.lcm(every, also_every))
    alone = {step for step in (*others, last) if step % every and step % (also_every or step + 1)}
    return found + sum(first < step <= last for step in alone)


def money(run: DeclaredRun, chip: Chip, times: tuple[RunTime, RunTime]) -> list[str]:
    """Dollars on demand and on spot, as ranges, or a line that asks for a missing price."""
    price = price_of(chip.name)
    if price is None or (price.on_demand is None and price.spot is None):
        return [f"no dated price of {chip.name}: give one in a file that PONENTE_PRICES names"]
    demand, spot = (t.total for t in times), (t.total + t.preemptions for t in times)
    found = []
    for rate, seconds, how in (
        (price.on_demand, demand, "on demand"),
        (price.spot, spot, f"spot with {PREEMPTIONS_A_DAY:g} preemptions a day"),
    ):
        if rate is not None:
            low, high = (rate * run.hardware.devices * each / 3600 for each in seconds)
            found.append(f"${low:,.2f} to ${high:,.2f} {how}")
    return [f"{', '.join(found)} ({price.source}, {price.date})"]
