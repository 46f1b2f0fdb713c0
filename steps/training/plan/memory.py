"""Whether a train step fits its hardware's memory by formula, and the nearest settings that fit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass

from models.shape.config import TransformerConfig
from pipeline import Hardware, InputError, pod
from pipeline.accelerators import TPUS
from steps.platforms import devices_of
from steps.training.plan.declared_run import DeclaredRun
from training.config import OptimizerConfig, TrainConfig
from training.cost.memory_estimate import GIB, Estimate, optimizer_bytes
from training.cost.resolved_run import ResolvedPhase, resolve_run

CERTAIN = 1.4
"""A step above this multiple of the limit cannot fit: estimates are at most 39 % above the peak."""
SHOWN = 3


@dataclass(frozen=True)
class MemoryFit:
    """A resolved step beside the memory of its devices, which is known; by formula."""

    run: ResolvedPhase

    @property
    def train(self) -> TrainConfig:
        """Its configuration without "auto"."""
        return self.run.train

    @property
    def estimate(self) -> Estimate:
        return self.run.estimate

    @property
    def limit(self) -> float:
        """Bytes of a device."""
        assert self.run.devices.limit is not None
        return self.run.devices.limit

    @property
    def fits(self) -> bool:
        """Whether the estimate is within the limit."""
        return self.estimate.total <= self.limit

    @property
    def cannot(self) -> bool:
        """Whether it does not fit even with the largest error that the estimate has shown."""
        return self.estimate.total > CERTAIN * self.limit

    def line(self, name: str) -> str:
        """Estimate and limit for a chip of that `name`, and the largest parts, as text."""
        need, limit = self.estimate.total / GIB, self.limit / GIB
        verdict = "fits" if self.fits else f"short by {need - limit:.1f} GiB"
        parts = sorted(self.estimate.parts.items(), key=lambda part: -part[1])[:4]
        named = ", ".join(f"{part} {size / GIB:.1f}" for part, size in parts)
        return f"{need:.1f} of {limit:.2f} GiB of each {name}: {verdict}; largest: {named}"


def fit(
    model: TransformerConfig, optimizer: OptimizerConfig, train: TrainConfig, hardware: Hardware
) -> MemoryFit:
    """The memory of a train step on a device of `hardware`, which has a known kind of chip."""
    return MemoryFit(resolve_run(model, optimizer, train, devices_of(hardware)).largest)


def nearest(run: DeclaredRun, share: float = 1.0) -> list[str]:
    """The nearest changes of settings with which the step fits by formula, one per line.

    They fill a `share` of the limit, below 1 if the compiler needed more than the formula.
    """
    found = []
    for text, train, hardware in _changes(run):
        try:
            other = fit(run.model, run.optimizer, train, hardware)
        except InputError:
            continue
        if other.estimate.total <= share * other.limit:
            need, limit = other.estimate.total / GIB, other.limit / GIB
            found.append(f"{text}: {need:.1f} of {limit:.2f} GiB")
        if len(found) == SHOWN:
            break
    return found


def _changes(run: DeclaredRun) -> Iterator[tuple[str, TrainConfig, Hardware]]:
    """Settings near the run's own; those that change no result come first."""
    train, hardware = run.train, run.hardware
    # Devices that the sequences of a batch are divided among.
    shards = hardware.devices // (train.parallel.sequence * train.parallel.tensor)
    auto = dataclasses.replace(
        train.parallel, sharding="auto", optimizer_memory="auto", reduce="auto"
    )
    free = dataclasses.replace(train, remat="auto", loss_chunks="auto", parallel=auto)
    if free != train:
        yield 'remat, loss_chunks and sharding "auto"', free, hardware
    for count in (2, 4, 8, 16, 32, 64):
        if count > train.microbatches and not train.batch_size % (count * shards):
            text = f"microbatches {count}"
            yield text, dataclasses.replace(train, microbatches=count), hardware
            if free != train:
                more = dataclasses.replace(free, microbatches=count)
                yield f'{text}, remat and sharding "auto"', more, hardware
    for name in _larger(hardware):
        yield f"hardware {name}", train, pod(name)
        if free != train:
            yield f'hardware {name}, remat and sharding "auto"', free, pod(name)
    for factor in (2, 4, 8, 16):
        if not train.batch_size % (factor * shards):
            rows = train.batch_size // factor
            yield f"batch_size {rows}", dataclasses.replace(train, batch_size=rows), hardware


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
    """Bytes of physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def host_need(run: DeclaredRun) -> float:
    """Least bytes of the training state and gradients of a run on this machine's CPUs."""
    copies = max(1, run.hardware.devices) if run.train.parallel.sharding == "replicated" else 1
    # Parameters and gradients in float32, and the optimizer's state.
    state = optimizer_bytes(run.model, run.optimizer)
    return copies * (8 * run.model.parameter_count + state)
