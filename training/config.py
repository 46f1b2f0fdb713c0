"""What a training run computes, as two frozen dataclasses that import no JAX.

Fields marked `Runtime` say how the computation is carried out (sharding, recomputation, how often
to log or to save); changing one of them does not change what is learned, so it is not part of the
identity of a run. Every other field is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pipeline.errors import InputError
from pipeline.fingerprint import Runtime
from training.checks import above_zero, at_least, below_one, one_of, rising
from training.optimizer_config import OptimizerConfig as OptimizerConfig
from training.parallelism import Parallelism

ATTENTION = ("auto", "reference", "blockwise", "splash", "cudnn")
COMPUTE_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, on what batches and with which cadence to train.

    Attributes:
        steps: optimizer steps.
        batch_size: sequences per step, over all devices (the global batch).
        sequence_length: tokens per sequence.
        separate_documents: attention stops at the end of a document (see `training.boundaries`).
        microbatches: parts a global batch is cut into to save memory; gradients are summed.
        seed: of the initial parameters.
        compute_dtype: dtype of products; parameters are float32.
        z_loss: weight of the squared log-partition term in the loss; 0 for none.
        batch_schedule: (steps done, batch_size) pairs in rising order: from there on batches have
            so many rows instead of `batch_size`.
        length_schedule: (steps done, pieces) pairs in rising order: from there on every row is cut
            into so many sequences of equal length, so a step has as many tokens as before. Such as
            ((0, 4), (1000, 2), (2000, 1)) for a short context first.
        ema: fading of an average of the parameters, which is then what is evaluated and exported;
            0 for none.
        spike_guard: a step whose loss is more than this many times the median of the last applied
            ones (see `training.step`) is not applied; 0 for none.
        evaluate_every: steps between evaluations; also before the first and after the last.
        evaluate_batches: most validation batches an evaluation reads.
        checkpoint_every: steps between checkpoints; also after the last.
        keep_checkpoints: checkpoints kept; older ones are dropped when a newer one is committed.
        log_every: steps between progress reports.
        max_skipped: steps in a row that were not applied after which training stops with an error.
        watchdog_seconds: least time without progress after which the run is ended, see
            `training.watchdog`.
        remat: what the backward pass keeps ("auto", "none", "products", "attention", "full",
            "dots", "save:name,...;offload:name,..."), see `models.residuals`.
        attention: "auto", "reference", "blockwise", "splash" or "cudnn".
        parallel: what the devices share, see `training.parallelism`.
        unroll: layers in one turn of the compiled loop over layers.
        loss_chunks: parts the logits are computed in, or "auto".
    """

    steps: int
    batch_size: int
    sequence_length: int
    separate_documents: bool = False
    microbatches: int = 1
    seed: int = 0
    compute_dtype: str = "bfloat16"
    z_loss: float = 0.0
    batch_schedule: tuple[tuple[int, int], ...] = ()
    length_schedule: tuple[tuple[int, int], ...] = ()
    ema: float = 0.0
    spike_guard: float = 0.0
    evaluate_every: int = 1000
    evaluate_batches: int = 8
    checkpoint_every: Annotated[int, Runtime] = 1000
    keep_checkpoints: Annotated[int, Runtime] = 2
    log_every: Annotated[int, Runtime] = 1
    max_skipped: Annotated[int, Runtime] = 10
    watchdog_seconds: Annotated[float, Runtime] = 120.0
    remat: Annotated[str, Runtime] = "auto"
    attention: Annotated[str, Runtime] = "auto"
    parallel: Annotated[Parallelism, Runtime] = Parallelism()
    unroll: Annotated[int, Runtime] = 1
    loss_chunks: Annotated[int | Literal["auto"], Runtime] = "auto"

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> TrainConfig:
        """From what `dataclasses.asdict` gives, as it comes back from JSON."""
        rebuilt: dict[str, Any] = {**fields, "parallel": Parallelism(**fields["parallel"])}
        for name in ("batch_schedule", "length_schedule"):
            rebuilt[name] = tuple((first, value) for first, value in fields[name])
        return cls(**rebuilt)

    def __post_init__(self) -> None:
        owner = "TrainConfig"
        at_least(
            owner,
            **{
                name: (getattr(self, name), 1)
                for name in (
                    *("steps", "batch_size", "microbatches", "evaluate_every", "evaluate_batches"),
                    *("checkpoint_every", "keep_checkpoints", "log_every", "max_skipped", "unroll"),
                )
            },
            sequence_length=(self.sequence_length, 2),
            seed=(self.seed, 0),
            z_loss=(self.z_loss, 0.0),
            spike_guard=(self.spike_guard, 0.0),
        )
        below_one(owner, ema=self.ema)
        above_zero(owner, watchdog_seconds=self.watchdog_seconds)
        if 0.0 < self.spike_guard <= 1.0:
            raise InputError(
                f"{owner}.spike_guard: {self.spike_guard} would skip every ordinary step; use 0 "
                "for none, or a number above 1 such as 3"
            )
        self._check_schedules(owner)
        one_of(owner, "compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        one_of(owner, "attention", self.attention, ATTENTION)
        if self.loss_chunks != "auto" and not (
            isinstance(self.loss_chunks, int) and self.loss_chunks >= 1
        ):
            raise InputError(
                f'{owner}.loss_chunks: expected "auto" or a number >= 1, got {self.loss_chunks!r}'
            )
        if isinstance(self.loss_chunks, int) and self.sequence_length % self.loss_chunks:
            raise InputError(
                f"{owner}: sequence_length {self.sequence_length} is not divisible by loss_chunks "
                f'{self.loss_chunks}; choose a divisor or "auto"'
            )

    def _check_schedules(self, owner: str) -> None:
        rising(owner, "batch_schedule", self.batch_schedule)
        rising(owner, "length_schedule", self.length_schedule)
        for size in (self.batch_size, *(size for _, size in self.batch_schedule)):
            if size % self.microbatches:
                raise InputError(
                    f"{owner}: batch_size {size} is not divisible by microbatches "
                    f"{self.microbatches}; change one of them"
                )
        for _, pieces in self.length_schedule:
            if self.sequence_length % pieces or self.sequence_length // pieces < 2:
                raise InputError(
                    f"{owner}.length_schedule: rows of {self.sequence_length} tokens cannot be cut "
                    f"into {pieces} equal sequences of at least 2; choose a divisor"
                )
