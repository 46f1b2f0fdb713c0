"""The configuration of a training run, as a frozen dataclass that imports no JAX.

Fields marked `Runtime` set how the computation is executed (sharding, remat) and the intervals of
logging, evaluation and checkpoints to resume from. They change neither the model nor which
checkpoints are kept for good, so they are not part of the identity of a run. All other fields are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from models.shape.remat_names import saved_names
from models.shape.validation import (
    BelowOne,
    Count,
    NotNegative,
    Positive,
    Seed,
    Whole,
    check_fields,
    check_value,
    from_plain,
)
from pipeline.errors import InputError
from pipeline.identity.fingerprint import Runtime
from training.config.optimizer import check_part, count_of
from training.config.parallelism import Parallelism

Tracker = Literal["tensorboard", "wandb", "trackio"]
TRACKERS = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
"""Tracker name, which is also the name of its extra -> its module."""

INSTALL = "install it with: pip install -e '.[{}]' in the checkout of ponente"
"""The hint when a tracker's module is not installed; formatted with its extra."""


def check_trackers(field: str, names: Sequence[str]) -> None:
    """Raise `InputError` for a name that is not a tracker's, or is given twice."""
    check_value(field, tuple(names), tuple[Tracker, ...])
    if len({*names}) < len(names):
        raise InputError(f"{field}: expected each tracker once, found {tuple(names)!r}")


ComputeDtype = Literal["bfloat16", "float32"]
Schedule = tuple[tuple[Whole, Count], ...]
MOST_STEPS = 2**31 - 1  # the train state counts them in int32
MOST_OF_START = 0.01  # of an EMA's weight before its bias correction
LONGEST_SEQUENCE = 2**22  # tokens; tile and batch sizes are searched by counting along a sequence


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Number of steps, batches, intervals and execution of a training run.

    Attributes:
        steps: optimizer steps; 0 to derive them from the budget of the train step.
        batch_size: sequences per step, over all devices (the global batch).
        sequence_length: tokens per sequence; 0 for the length of the sequences trained on.
        separate_documents: whether attention stops at the end of a document (see
            `training.step.train_step`).
        microbatches: parts of a global batch, to save memory; their gradients are summed.
        seed: seed of the initial parameters; None for the seed of the sequences trained on.
        compute_dtype: dtype of matmuls; parameters are float32.
        z_loss: weight of the squared log-partition term in the loss; 0 for none.
        batch_schedule: (steps done, batch_size) pairs in rising order: from that step on, batches
            have this size instead of `batch_size`.
        length_schedule: (steps done, pieces) pairs in rising order: from that step on, every
            sequence of `sequence_length` tokens is cut into this many equal ones, so a step has as
            many tokens as before. ((0, 4), (1000, 2), (2000, 1)) begins with a short context.
        ema: decay of the parameter EMA that is then evaluated and exported; 0 for none. It is
            corrected for its start, see `training.step.state.ema_weight`.
        average_last: the mean of the parameters after each of the last steps that were applied is
            evaluated and exported, as in the records of modded-nanogpt; a fraction of all steps
            when below 1, else steps; 0 for none. It takes the place and the memory of the EMA.
        spike_guard: a step is not applied when its loss is more than this many times the median
            loss of the last applied steps (see `training.step.state`); 0 for no guard.
        evaluate_every: steps between evaluations; also before the first and after the last.
        evaluate_batches: an evaluation reads this many times `batch_size` sequences of each
            held-out split, spread over the split; "all" for the whole split.
        evaluate_batch_size: sequences evaluated at once, rounded up to a multiple of the devices
            that share a batch; None for as many as in a microbatch.
        checkpoint_every: steps between checkpoints to resume from; also after the last.
        keep_checkpoints: number of the newest of these that are kept; older ones are deleted when a
            newer one is committed. Only checkpoints of the next two fields, and the last one, are
            published.
        keep_every: a checkpoint is saved at each multiple of this many steps and never deleted; 0
            for none.
        milestones: steps at which a checkpoint is saved and never deleted.
        max_skipped: training stops with an error when this many steps in a row were not applied.
        watchdog_seconds: least timeout without progress, see `training.fault`.
        remat: intermediates that the backward pass keeps ("auto", "none", "matmuls", "attention",
            "full", "dots", "save:name,...;offload:name,..."), see `models.shape.remat_names`.
        attention: backend: "auto", "reference", "blockwise", "ponente", "splash", "cudnn"
            or "triton".
        parallel: sharding over the devices, see `training.config.parallelism`.
        unroll: cycles of layers (of `window_pattern`) per iteration of the compiled loop.
        loss_chunks: chunks in which the logits are computed, or "auto".
        compiler_options: (name, value) pairs that the compiler gets besides those of
            `training.cost.compiler_options`; the value "default" leaves one of these out.
        trackers: trackers that get the rows of `metrics.jsonl`: "tensorboard", "wandb", "trackio".
        profile: (first step, number of steps) to trace, see `training.metrics.profiler`.
    """

    steps: Annotated[int, Meta(ge=0, le=MOST_STEPS)] = 0
    batch_size: Count
    sequence_length: Annotated[int, Meta(ge=0, le=LONGEST_SEQUENCE)] = 0
    separate_documents: bool = False
    microbatches: Count = 1
    seed: Seed | None = None
    compute_dtype: ComputeDtype = "bfloat16"
    z_loss: NotNegative = 0.0
    batch_schedule: Schedule = ()
    length_schedule: Schedule = ()
    ema: BelowOne = 0.0
    average_last: NotNegative = 0.0
    spike_guard: NotNegative = 0.0
    evaluate_every: Annotated[Count, Runtime] = 1000
    evaluate_batches: Annotated[Count | Literal["all"], Runtime] = 8
    evaluate_batch_size: Annotated[Count | None, Runtime] = None
    checkpoint_every: Annotated[Count, Runtime] = 1000
    keep_checkpoints: Annotated[Count, Runtime] = 2
    keep_every: Whole = 0
    milestones: tuple[Count, ...] = ()
    log_every: Annotated[Count, Runtime] = 1
    max_skipped: Annotated[Count, Runtime] = 10
    watchdog_seconds: Annotated[Positive, Runtime] = 120.0
    remat: Annotated[str, Runtime] = "auto"
    attention: Annotated[
        Literal["auto", "reference", "blockwise", "ponente", "splash", "cudnn", "triton"], Runtime
    ] = "auto"
    parallel: Annotated[Parallelism, Runtime] = Parallelism()
    unroll: Annotated[Count, Runtime] = 1
    loss_chunks: Annotated[Count | Literal["auto"], Runtime] = "auto"
    compiler_options: Annotated[tuple[tuple[str, str], ...], Runtime] = ()
    trackers: Annotated[tuple[Tracker, ...], Runtime] = ()
    profile: Annotated[tuple[Count, Count] | None, Runtime] = None

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> TrainConfig:
        """A config from the JSON of `dataclasses.asdict`; absent fields have their defaults."""
        return from_plain(cls, fields)

    @property
    def averaged_steps(self) -> int:
        """Number of last steps whose parameters are averaged."""
        return count_of(self.average_last, self.steps)

    @property
    def short_for_ema(self) -> str:
        """A warning where the EMA's window is as long as much of the run; empty if it is not."""
        if not self.steps or self.ema**self.steps <= MOST_OF_START:
            return ""
        window = 1.0 / (1.0 - self.ema)
        return (
            f"TrainConfig.ema: an EMA of decay {self.ema:g} averages over {window:,.0f} steps and "
            f"more, in a run of {self.steps:,} also over the first ones; lower ema for a model "
            "that is nearer to the last parameters"
        )

    @property
    def evaluate_sequences(self) -> int | None:
        """Sequences of each held-out split that an evaluation reads; None for all."""
        return None if self.evaluate_batches == "all" else self.evaluate_batches * self.batch_size

    @property
    def evaluation_batch(self) -> int:
        """Sequences evaluated at once; by default those of a microbatch, whose step fits."""
        return self.evaluate_batch_size or max(1, self.batch_size // self.microbatches)

    @property
    def batch_shapes(self) -> list[tuple[int, int, int]]:
        """(steps done, rows of the data in a batch, pieces of a row) where these change."""
        sizes, cuts = dict(self.batch_schedule), dict(self.length_schedule)
        found, rows, pieces = [], self.batch_size, 1
        for first in sorted({0, *sizes, *cuts}):
            rows, pieces = sizes.get(first, rows), cuts.get(first, pieces)
            if not self.steps or first < self.steps:
                found.append((first, rows, pieces))
        return found

    def __post_init__(self) -> None:
        check_fields(self)
        owner = "TrainConfig"
        if self.sequence_length == 1:
            raise InputError(f"{owner}.sequence_length: expected a number >= 2, found 1")
        if 0.0 < self.spike_guard <= 1.0:
            raise InputError(
                f"{owner}.spike_guard: {self.spike_guard} would skip every ordinary step; use 0 "
                "for none, or a number above 1 such as 3"
            )
        check_part(f"{owner}.average_last", self.average_last)
        if self.ema and self.average_last:
            raise InputError(
                f"{owner}: expected one average of the parameters, found ema {self.ema} and "
                f"average_last {self.average_last}; set one of them to 0"
            )
        if self.steps and self.averaged_steps > self.steps:
            raise InputError(
                f"{owner}.average_last: {self.averaged_steps:,} last steps are more than the "
                f"{self.steps:,} of the run; lower it"
            )
        self._check_schedules(owner)
        if self.remat not in ("auto", "none", "dots"):
            saved_names(self.remat)
        check_trackers(f"{owner}.trackers", self.trackers)
        if isinstance(self.loss_chunks, int) and self.sequence_length % self.loss_chunks:
            raise InputError(
                f"{owner}: sequence_length {self.sequence_length} is not divisible by loss_chunks "
                f'{self.loss_chunks}; choose a divisor or "auto"'
            )

    def _check_schedules(self, owner: str) -> None:
        for name in ("batch_schedule", "length_schedule"):
            firsts = [first for first, _ in getattr(self, name)]
            if firsts != sorted({*firsts}):
                raise InputError(
                    f"{owner}.{name}: expected pairs (steps done, value) with rising steps, found "
                    f"{getattr(self, name)}"
                )
        if self.batch_schedule and not self.batch_schedule[0][0]:
            raise InputError(
                f"{owner}.batch_schedule: expected steps from 1, found {self.batch_schedule}; "
                "batch_size is the size from step 0 on"
            )
        for pieces in (1, *(pieces for _, pieces in self.length_schedule)):
            if self.sequence_length // pieces % self.parallel.sequence:
                raise InputError(
                    f"{owner}: sequences of {self.sequence_length // pieces} tokens do not divide "
                    f"over Parallelism.sequence={self.parallel.sequence}; change one of them"
                )
        for size in dict.fromkeys(rows * pieces for _, rows, pieces in self.batch_shapes):
            if size % self.microbatches:
                raise InputError(
                    f"{owner}: batch_size {size} is not divisible by microbatches "
                    f"{self.microbatches}; change one of them"
                )
        for _, pieces in self.length_schedule:
            if self.sequence_length and (
                self.sequence_length % pieces or self.sequence_length // pieces < 2
            ):
                raise InputError(
                    f"{owner}.length_schedule: rows of {self.sequence_length} tokens cannot be cut "
                    f"into {pieces} equal sequences of at least 2; choose a divisor"
                )
