"""What `plan` predicts of a run's steps, from its configuration and the kind of chip; no JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from models.config import TransformerConfig
from models.flops import training_flops_per_token
from pipeline.accelerators import Chip
from training.config import OptimizerConfig, TrainConfig
from training.config.optimizer import state_bytes_per_parameter
from training.cost.calibration import CALIBRATION, rates
from training.cost.step_time import Times, times
from training.cost.step_work import Job, work


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A predicted step; a prediction, never a measurement.

    Attributes:
        times: seconds by what they are spent on.
        tokens: of a step, over all devices.
        mfu: model FLOPs over the peak, attention counted causally.
        mfu_full: the same with attention over the full square.
    """

    times: Times
    tokens: int
    mfu: float
    mfu_full: float

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.times.total

    @property
    def range(self) -> tuple[float, float]:
        """Seconds between which 8 of 10 tuned published runs lie when predicted like this."""
        return self.seconds * CALIBRATION.fast, self.seconds * CALIBRATION.slow

    @property
    def shares(self) -> dict[str, float]:
        """Of the step's time by kind, the largest first."""
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
    """The prediction for a configuration without "auto" on so many chips of a kind."""
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
        state_bytes=state_bytes_per_parameter(optimizer),
        on_host=train.parallel.optimizer_memory == "host",
    )
    found = times(work(job, chip), chip, rates(chip))
    causal, full = (
        job.tokens * training_flops_per_token(model, train.sequence_length, causal=way)
        for way in (True, False)
    )
    peak = chip.peak * found.total
    return Forecast(
        times=found,
        tokens=train.batch_size * train.sequence_length,
        mfu=causal / peak,
        mfu_full=full / peak,
    )
