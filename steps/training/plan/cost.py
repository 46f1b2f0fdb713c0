"""Predicted time and cost of a whole run, and the speed of the last one on this machine."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from models.shape.footprint import training_flops_per_token
from pipeline import Hardware
from pipeline.accelerators import Chip, chip_of
from pipeline.errors import CorruptOutput
from pipeline.graph.facts import Published, Results
from pipeline.prices import Price, price_of
from pipeline.store import manifest, storage
from steps.artifacts import Checkpoint
from steps.training.plan.declared_run import DeclaredRun
from training.config import TrainConfig
from training.config.batch_schedule import rows_read
from training.cost.memory_estimate import optimizer_bytes
from training.cost.resolved_run import ResolvedRun
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
_STEPS = ("train-", "extend-", "warm_start-")
_MOST = 8  # outputs that are looked into for a measured speed, the newest first


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


def checkpoint_bytes(run: DeclaredRun) -> float:
    """Bytes of one checkpoint: float32 parameters, their average, and the optimizer's state."""
    average = run.train.ema or run.train.average_last
    parameters = (8 if average else 4) * run.model.parameter_count
    return parameters + optimizer_bytes(run.model, run.optimizer)


def save_seconds(run: DeclaredRun) -> float:
    return checkpoint_bytes(run) / run.hardware.devices / SAVE_BYTES


def run_time(run: DeclaredRun, train: TrainConfig, step: Forecast, seconds: float) -> RunTime:
    """The times of the steps that are left, if a step takes `seconds`."""
    assert run.steps is not None
    saves = _count(run, run.whole.checkpoint_every, run.whole.keep_every, run.whole.milestones)
    evaluated = _count(run, run.whole.evaluate_every) + (not run.done)  # also before the first step
    batches = 0 if train.evaluate_batches == "all" else int(train.evaluate_batches)
    useful = step.seconds - step.times["update"] - step.times["fixed"]
    steps = (run.steps - run.done) * seconds
    checkpoints = saves * save_seconds(run)
    # A forward pass is a third of a step, whose backward pass costs twice as much.
    evaluations = evaluated * batches * run.splits * useful / 3
    return RunTime(steps, START_SECONDS, checkpoints, evaluations)


def run_times(run: DeclaredRun, resolved: ResolvedRun, step: Forecast, chip: Chip) -> list[RunTime]:
    """The run's times at the fast end of the largest step's forecast, the middle and the slow."""
    seconds: dict[TrainConfig, float] = {}
    total, count, train = 0.0, 0, resolved.largest.train
    for each in resolved.phases:
        if each.train not in seconds:
            seconds[each.train] = forecast(each, chip).seconds
        steps = each.phase.end - max(each.phase.first, run.done)
        total, count = total + steps * seconds[each.train], count + steps
    share = total / max(count, 1) / step.seconds
    ends = (step.range[0], step.seconds, step.range[1])
    return [run_time(run, train, step, share * each) for each in ends]


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


def bills(hardware: Hardware, price: Price | None, times: Sequence[RunTime]) -> Bills:
    """Dollars of a run of each time before preemptions, by "on_demand" and "spot"."""
    found: Bills = {}
    for how in ("on_demand", "spot"):
        if (rate := getattr(price, how, None)) is not None:
            found[how] = [rate * hardware.chips * each.total / 3600 for each in times]
    return found


def money(run: DeclaredRun, chip: Chip, times: tuple[RunTime, RunTime]) -> list[str]:
    """Dollars on demand and on spot, as ranges, or a line that asks for a missing price."""
    price = price_of(chip.name)
    found = bills(run.hardware, price, times)
    if price is None or not found:
        return [f"no public price of {chip.name}: give one in a file that PONENTE_PRICES names"]
    words = {"on_demand": "on demand", "spot": "on spot before preemptions"}
    amounts = [f"${low:,.2f} to ${high:,.2f} {words[how]}" for how, (low, high) in found.items()]
    return [f"{', '.join(amounts)} ({price.source}, {price.date})"]


def speed_here(results: Results, devices: int) -> tuple[float, str] | None:
    """FLOP/s on this machine's CPUs and the output that they were measured in.

    The FLOPs are of all steps of its attempts, with causal attention; their time is that between
    the first step and the last without evaluations and saves. None where no training on this
    machine with so many devices is in the store, or the store is not on a disk.
    """
    for run in newest(results):
        train, flops, seconds = run.train, 0.0, 0.0
        length = train.sequence_length
        for attempt in run.attempts:
            if attempt.devices == devices and attempt.first_step is not None:
                last, first = (rows_read(train, n) for n in (attempt.last_step, attempt.first_step))
                tokens = (last - first) * length
                flops += tokens * training_flops_per_token(run.model, length, causal=True)
                seconds += attempt.buckets.get("step", 0.0)
        if flops and seconds:
            return flops / seconds, run.path.rpartition("/")[2]
    return None


def newest(results: Results, chip: Chip | None = None) -> Iterator[Checkpoint]:
    """Trainings in a local store on a kind of chip, or on this machine's CPUs, newest first."""
    prefix = results.prefix if isinstance(results, Published) else ""
    if not prefix or not storage.is_local(prefix):
        return
    found = []
    for name in filter(lambda name: name.startswith(_STEPS), storage.list_names(prefix)):
        with contextlib.suppress(OSError):
            path = storage.join(prefix, name)
            written = os.stat(storage.local_path(storage.join(path, manifest.NAME))).st_mtime
            found.append((written, path))
    for _, path in sorted(found, reverse=True)[:_MOST]:
        with contextlib.suppress(CorruptOutput):
            made = manifest.load(path)
            if made is None:
                continue
            kind = made.result.get("measured", {}).get("devices", "").partition(" x ")[2]
            here = kind == "cpu" and made.provenance.get("host") == socket.gethostname()
            if here if chip is None else chip_of(kind) is chip:
                yield Checkpoint(path, made)
