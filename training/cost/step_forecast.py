"""Predicts a run's step time for `plan` from its configuration and kind of chip; imports no JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from models.config import TransformerConfig
from models.flops import training_flops_per_token
from pipeline.accelerators import Chip
from training.config import OptimizerConfig, TrainConfig
from training.cost import calibration
from training.cost.calibration import rates
from training.cost.memory_estimate import optimizer_bytes
from training.cost.step_time import Times, times
from training.cost.step_work import Job, orthogonalization_flops, work


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A predicted step.

    Attributes:
        times: seconds by kind of work.
        tokens: tokens per step, over all devices.
        mfu: model FLOPs over the peak, with causal attention.
        mfu_full: the same with attention over all pairs.
    """

    times: Times
    tokens: int
    mfu: float
    mfu_full: float

    @property
    def seconds(self) -> float:
        """Predicted seconds of one step."""
        return self.times.total

    @property
    def range(self) -> tuple[float, float]:
        """80 % interval of the step's seconds, from the errors for tuned published runs."""
        return self.seconds * calibration.FAST, self.seconds * calibration.SLOW

    @property
    def shares(self) -> dict[str, float]:
        """Share of the step's time by kind of work, the largest first."""
        kinds = [field.name for field in dataclasses.fields(Times)]
        found = {kind: getattr(self.times, kind) / self.seconds for kind in kinds}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def forecast(
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    chip: Chip,
    devices: int,
    slices: int = 1,
) -> Forecast:
    """The prediction for a configuration without "auto" on `devices` chips of one kind."""
    _, group, sequence, tensor = train.parallel.mesh_shape(devices)
    job = Job(
        model=model,
        rows=train.batch_size / devices,
        sequence_length=train.sequence_length,
        chips=devices,
        group=group,
        sharding=train.parallel.sharding,
        sequence=sequence,
        tensor=tensor,
        slices=slices,
        microbatches=train.microbatches,
        remat=train.remat,
        state_bytes=optimizer_bytes(model, optimizer) / model.parameter_count,
        update_flops=orthogonalization_flops(model, optimizer) / (group * tensor),
        on_host=train.parallel.optimizer_memory == "host",
    )
    found = times(work(job, chip), chip, rates(chip))
    causal, full = (
        job.tokens * training_flops_per_token(model, train.sequence_length, causal=causal)
        for causal in (True, False)
    )
    peak = chip.peak * found.total
    return Forecast(
        times=found,
        tokens=train.batch_size * train.sequence_length,
        mfu=causal / peak,
        mfu_full=full / peak,
    )
