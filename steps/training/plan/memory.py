"""Whether a train step fits its hardware's memory by formula, and the nearest settings that fit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

from models.shape.config import TransformerConfig
from pipeline import Hardware, InputError, pod
from pipeline.accelerators import TPUS
from steps.platforms import devices_of
from steps.training.plan.cost import checkpoint_bytes
from steps.training.plan.declared_run import DeclaredRun
from training.config import OptimizerConfig, TrainConfig
from training.config.batch_schedule import batch_phases, largest_of
from training.cost.memory_estimate import GIB
from training.cost.resolved_run import ResolvedPhase, resolve_run

CERTAIN = 1.4
"""A step above this multiple of the limit cannot fit: estimates are at most 39 % above the peak."""


def step_on(
    hardware: Hardware, model: TransformerConfig, optimizer: OptimizerConfig, train: TrainConfig
) -> ResolvedPhase:
    """The largest step on `hardware`, which has a known kind of chip, with nothing "auto"."""
    return resolve_run(model, optimizer, train, devices_of(hardware)).largest


def limit_of(step: ResolvedPhase) -> float:
    """Bytes of one of its devices, whose memory is known."""
    assert step.devices.limit is not None
    return step.devices.limit


def fits(step: ResolvedPhase, share: float = 1.0) -> bool:
    """Whether its memory by formula is within a share of the limit."""
    return step.estimate.total <= share * limit_of(step)


def described(step: ResolvedPhase, chip: str) -> str:
    """Estimate and limit, and the largest parts, as text."""
    need, limit = step.estimate.total / GIB, limit_of(step) / GIB
    verdict = "fits" if fits(step) else f"short by {need - limit:.1f} GiB"
    parts = sorted(step.estimate.parts.items(), key=lambda part: -part[1])[:4]
    named = ", ".join(f"{part} {size / GIB:.1f}" for part, size in parts)
    return f"{need:.1f} of {limit:.2f} GiB of each {chip}: {verdict}; largest: {named}"


def nearest(run: DeclaredRun, share: float = 1.0) -> list[str]:
    """The nearest changes of settings with which the run fits a share of the limit by formula."""
    found = []
    for text, settings, hardware in _changes(run):
        try:
            other = _largest(run, settings, hardware)
        except InputError:  # one of the run's batches does not divide so
            continue
        if fits(other, share):
            need, limit = other.estimate.total / GIB, limit_of(other) / GIB
            found.append(f"{text}: {need:.1f} of {limit:.2f} GiB")
        if len(found) == 3:
            break
    return found


def _largest(run: DeclaredRun, settings: Mapping[str, Any], hardware: Hardware) -> ResolvedPhase:
    """The largest step of the run with other settings; refused as `plan` refuses them."""
    train = dataclasses.replace(run.whole, **settings)
    if not run.steps:  # which leaves open which phases the run has
        train = largest_of(batch_phases(train)).config(train)
    where = devices_of(hardware)
    return resolve_run(run.model, run.optimizer, train, where, done=run.done).largest


def _changes(run: DeclaredRun) -> Iterator[tuple[str, Mapping[str, Any], Hardware]]:
    """Settings near the run's own, some invalid; those that change no result come first."""
    train, hardware = run.whole, run.hardware
    auto = dataclasses.replace(
        train.parallel, sharding="auto", optimizer_memory="auto", reduce="auto"
    )
    free: dict[str, Any] = {"remat": "auto", "loss_chunks": "auto", "parallel": auto}
    forced = dataclasses.replace(train, **free) != train
    if forced:
        yield 'remat, loss_chunks and sharding "auto"', free, hardware
    for count in (2, 4, 8, 16, 32, 64):
        if count > train.microbatches:
            text, parts = f"microbatches {count}", {"microbatches": count}
            yield text, parts, hardware
            if forced:
                yield f'{text}, remat and sharding "auto"', free | parts, hardware
    for name in _larger(hardware):
        yield f"hardware {name}", {}, pod(name)
        if forced:
            yield f'hardware {name}, remat and sharding "auto"', free, pod(name)
    sizes = [train.batch_size, *(size for _, size in train.batch_schedule)]
    for factor in (2, 4, 8, 16):
        if any(size % factor for size in sizes):
            continue
        later = tuple((first, size // factor) for first, size in train.batch_schedule)
        smaller = {"batch_size": train.batch_size // factor, "batch_schedule": later}
        text = f"batch_size {smaller['batch_size']}"
        yield text + (f", batch_schedule {later}" if later else ""), smaller, hardware


def _larger(hardware: Hardware) -> list[str]:
    tpu = TPUS.get(hardware.generation)
    if tpu is None:
        hosts = hardware.processes
        return [
            f"{count}x{hardware.chips_per_process}x{hardware.generation}"
            for count in (2 * hosts, 4 * hosts, 8 * hosts)
        ]
    times = f"{hardware.slices}x" if hardware.slices > 1 else ""
    chips_of_slice = hardware.chips // hardware.slices
    return [f"{times}{name}" for name, chips in tpu.names.items() if chips > chips_of_slice]


def host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_need(run: DeclaredRun) -> float:
    """Least bytes of the training state and gradients of a run on this machine's CPUs."""
    copies = max(1, run.hardware.devices) if run.train.parallel.sharding == "replicated" else 1
    gradients = 4 * run.model.parameter_count  # in float32
    return copies * (checkpoint_bytes(run) + gradients)
