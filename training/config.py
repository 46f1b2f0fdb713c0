"""What a training run computes, as two frozen dataclasses that import no JAX.

Fields marked `Runtime` say how the computation is carried out (sharding, recomputation, how often
to log or to save); changing one of them does not change what is learned, so it is not part of the
identity of a run. Every other field is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pipeline.errors import InputError
from pipeline.fingerprint import Runtime

SCHEDULES = ("cosine", "wsd", "constant")
COMPUTE_DTYPES = ("bfloat16", "float32")


def _at_least(owner: str, **fields: tuple[float, float]) -> None:
    for name, (value, bound) in fields.items():
        if not value >= bound or math.isinf(value):
            raise InputError(f"{owner}.{name}: expected a number >= {bound}, got {value}")


def _fraction(owner: str, **fields: float) -> None:
    for name, value in fields.items():
        if not 0.0 <= value <= 1.0:
            raise InputError(f"{owner}.{name}: expected a number from 0 to 1, got {value}")


def _one_of(owner: str, name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{owner}.{name}: expected one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (https://arxiv.org/abs/1711.05101) with a learning-rate schedule.

    Attributes:
        learning_rate: peak rate.
        schedule: "cosine", "wsd" (warmup, stable, decay: a constant rate with a linear tail,
            https://arxiv.org/abs/2404.06395) or "constant".
        warmup: linear warmup; a fraction of all steps when below 1, else a number of steps.
        decay: length of the "wsd" tail; a fraction of all steps when below 1, else steps.
        min_ratio: last rate over peak rate ("cosine" and "wsd").
        weight_decay: decoupled decay of matrices; norms, biases and embeddings have none.
        clip_norm: global gradient norm above which gradients are scaled down to it.
    """

    learning_rate: float = 3e-4
    schedule: str = "cosine"
    warmup: float = 0.01
    decay: float = 0.2
    min_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        owner = "OptimizerConfig"
        _one_of(owner, "schedule", self.schedule, SCHEDULES)
        _fraction(owner, min_ratio=self.min_ratio, beta1=self.beta1, beta2=self.beta2)
        if 1.0 in (self.beta1, self.beta2):
            raise InputError(
                f"{owner}: beta1 and beta2 must be below 1, got {self.beta1} and {self.beta2}"
            )
        _at_least(
            owner,
            learning_rate=(self.learning_rate, 0.0),
            warmup=(self.warmup, 0.0),
            decay=(self.decay, 0.0),
            weight_decay=(self.weight_decay, 0.0),
        )
        for name, value in (("epsilon", self.epsilon), ("clip_norm", self.clip_norm)):
            if not value > 0.0:
                raise InputError(f"{owner}.{name}: expected a number above 0, got {value}")


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
        compute_dtype: dtype of matmuls; parameters and optimizer state are float32.
        z_loss: weight of the squared log-partition term in the loss; 0 for none.
        evaluate_every: steps between evaluations; also before the first and after the last.
        evaluate_batches: most validation batches an evaluation reads.
        checkpoint_every: steps between checkpoints; also after the last.
        keep_checkpoints: checkpoints kept; older ones are dropped when a newer one is committed.
        log_every: steps between progress reports.
        max_skipped: non-finite steps in a row after which training stops with an error.
        remat: what the backward pass recomputes ("none", "full", "dots", "save:name,...").
        attention: "auto", "reference" or "splash".
        fsdp: devices over which parameters and optimizer state are split.
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
    evaluate_every: int = 1000
    evaluate_batches: int = 8
    checkpoint_every: Annotated[int, Runtime] = 1000
    keep_checkpoints: Annotated[int, Runtime] = 2
    log_every: Annotated[int, Runtime] = 1
    max_skipped: Annotated[int, Runtime] = 10
    remat: Annotated[str, Runtime] = "full"
    attention: Annotated[str, Runtime] = "auto"
    fsdp: Annotated[int, Runtime] = 1
    loss_chunks: Annotated[int | Literal["auto"], Runtime] = "auto"

    def __post_init__(self) -> None:
        owner = "TrainConfig"
        _at_least(
            owner,
            **{
                name: (getattr(self, name), 1)
                for name in (
                    *("steps", "batch_size", "microbatches", "evaluate_every", "evaluate_batches"),
                    *("checkpoint_every", "keep_checkpoints", "log_every", "max_skipped", "fsdp"),
                )
            },
            sequence_length=(self.sequence_length, 2),
            seed=(self.seed, 0),
            z_loss=(self.z_loss, 0.0),
        )
        _one_of(owner, "compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        _one_of(owner, "attention", self.attention, ("auto", "reference", "splash"))
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
        if self.batch_size % self.microbatches:
            raise InputError(
                f"{owner}: batch_size {self.batch_size} is not divisible by microbatches "
                f"{self.microbatches}; change one of them"
            )
