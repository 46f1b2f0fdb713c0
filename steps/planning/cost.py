"""How long a whole run will take and what it will cost: steps, and what comes on top of them."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.accelerators import Chip
from pipeline.prices import price_of
from steps.planning.declared_run import DeclaredRun
from training.config import TrainConfig
from training.config.optimizer import state_bytes_per_parameter
from training.cost.step_forecast import Forecast

START_SECONDS = 120.0
"""Of hosts that start, JAX, and the compiler: 40 s until devices are ready and 20 to 60 s of
compiling in published logs."""
SAVE_BYTES = 32e9
"""A second, from a chip to its host, for which a checkpoint stops the steps (Orbax's guide)."""
PREEMPTIONS_A_DAY = 2.0
"""Assumed of a spot slice; no one publishes a rate."""


@dataclass(frozen=True)
class RunTime:
    """Predicted seconds of a run, by what they are spent on."""

    steps: float
    start: float
    checkpoints: float
    evaluations: float
    preemptions: float

    @property
    def total(self) -> float:
        """On demand; `preemptions` come on top on spot."""
        return self.steps + self.start + self.checkpoints + self.evaluations


def checkpoint_bytes(run: DeclaredRun) -> float:
    """Of one checkpoint: float32 parameters, their average, and the optimizer's state."""
    each = 4 + state_bytes_per_parameter(run.optimizer) + (4 if run.train.ema else 0)
    return each * run.model.parameter_count


def run_time(run: DeclaredRun, train: TrainConfig, step: Forecast, seconds: float) -> RunTime:
    """The whole run, if a step takes `seconds`."""
    assert run.steps is not None
    saves = run.steps // train.checkpoint_every + 1
    looks = run.steps // train.evaluate_every + 2
    batches = 0 if train.evaluate_batches == "all" else int(train.evaluate_batches)
    useful = step.seconds - step.times.update - step.times.fixed
    steps = run.steps * seconds
    start = START_SECONDS
    checkpoints = saves * checkpoint_bytes(run) / run.hardware.devices / SAVE_BYTES
    evaluations = looks * batches * run.splits * useful / 3
    whole = steps + start + checkpoints + evaluations
    lost = START_SECONDS + train.checkpoint_every / 2 * seconds
    return RunTime(steps, start, checkpoints, evaluations, whole / 86400 * PREEMPTIONS_A_DAY * lost)


def money(run: DeclaredRun, chip: Chip, times: tuple[RunTime, RunTime]) -> list[str]:
    """Dollars on demand and on spot, as a range; a line that says so where no price is known."""
    price = price_of(chip.name)
    chips = run.hardware.devices
    if price is None or (price.on_demand is None and price.spot is None):
        return [f"no dated price of {chip.name}: give one in a file that PONENTE_PRICES names"]
    found = []
    if price.on_demand is not None:
        ends = [price.on_demand * chips * t.total / 3600 for t in times]
        found.append(f"${ends[0]:,.2f} to ${ends[1]:,.2f} on demand")
    if price.spot is not None:
        ends = [price.spot * chips * (t.total + t.preemptions) / 3600 for t in times]
        found.append(
            f"${ends[0]:,.2f} to ${ends[1]:,.2f} spot with {PREEMPTIONS_A_DAY:g} preemptions a day"
        )
    return [f"{', '.join(found)} ({price.source}, {price.date})"]
