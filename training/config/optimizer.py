"""The optimizer of a run and the size of its state, without importing JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from models.shape.validation import BelowOne, Count, NotNegative, Positive, Share, check_fields
from pipeline.errors import InputError

Kind = Literal["adamw", "muon", "lion"]
Schedule = Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
MOMENT_BYTES = {"float32": 4, "bfloat16": 2}

# A bfloat16 number has 8 significant bits. Multiplied by a larger beta it can round back to itself,
# and a moment that should decay never changes.
LARGEST_BFLOAT16_BETA = 1.0 - 2.0**-8


def count_of(part: float, steps: int) -> int:
    """Number of steps: `part` of `steps` if below 1 (rounded to nearest), else `part` itself."""
    return round(part * steps) if part < 1.0 else int(part)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer with decoupled weight decay and a learning-rate schedule.

    "adamw" (https://arxiv.org/abs/1711.05101) updates every parameter. "muon"
    (https://kellerjordan.github.io/posts/muon) updates the matrices of the blocks; embedding, head,
    norms and biases use AdamW with its fields, see `training.optimizer`. "lion"
    (https://arxiv.org/abs/2302.06675) updates every parameter; its update is a sign, so the paper
    advises a learning rate 3 to 10 times smaller than AdamW's and a weight decay as much larger.

    Fields of kinds other than `kind` have no effect.

    Attributes:
        kind: "adamw", "muon" or "lion".
        learning_rate: peak learning rate.
        schedule: "cosine", "linear" (https://arxiv.org/abs/2502.15938), "wsd" (warmup, stable,
            decay: a constant rate with a linear tail, https://arxiv.org/abs/2404.06395),
            "inverse_sqrt" (https://arxiv.org/abs/1706.03762) or "constant".
        warmup: linear warmup; a fraction of all steps when below 1, else a number of steps.
        decay: length of the "wsd" tail; a fraction of all steps when below 1, else steps.
        min_ratio: last rate over peak rate ("cosine", "linear", "wsd"), or lower bound of that
            ratio ("inverse_sqrt").
        beta1: decay of AdamW's mean of gradients.
        beta2: decay of AdamW's mean of squared gradients.
        epsilon: added to AdamW's denominator.
        weight_decay: decoupled decay of matrices; norms, biases and embeddings have none.
        decay_tables: whether weight decay applies to embeddings too, also to a tied one.
        clip_norm: maximum global gradient norm; larger gradients are scaled down to it.
        moment_dtype: dtype of moments between steps, "float32" or "bfloat16" (as in
            https://arxiv.org/abs/2412.19437, section 3.3.3); they are computed in float32.
        muon_learning_rate: peak learning rate of Muon's matrices, on the same schedule; None for
            `learning_rate`, which Moonshot shares too (https://arxiv.org/abs/2502.16982).
        muon_momentum: decay of the mean of gradients; 0.95 is Jordan's.
        muon_nesterov: whether to use Nesterov momentum; Jordan's choice.
        muon_steps: Newton-Schulz iterations, in the compute dtype; 5 is Jordan's.
        muon_rms: root mean square of a full-rank update, which is scaled by
            `muon_rms * sqrt(max(fan_in, fan_out))`; 0.2 is Moonshot's, near the RMS of AdamW's
            updates. None for Jordan's factor `sqrt(max(1, fan_out / fan_in))`, for a
            `muon_learning_rate` of about 0.02.
        lion_beta1: weight of the momentum in the update; 0.9 is the paper's.
        lion_beta2: decay of the momentum; 0.99 is the paper's.
    """

    kind: Kind = "adamw"
    learning_rate: NotNegative = 3e-4
    schedule: Schedule = "cosine"
    warmup: NotNegative = 0.01
    decay: NotNegative = 0.2
    min_ratio: Share = 0.1
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    decay_tables: bool = False
    clip_norm: Positive = 1.0
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    muon_learning_rate: NotNegative | None = None
    muon_momentum: BelowOne = 0.95
    muon_nesterov: bool = True
    muon_steps: Count = 5
    muon_rms: Positive | None = 0.2
    lion_beta1: BelowOne = 0.9
    lion_beta2: BelowOne = 0.99

    def __post_init__(self) -> None:
        check_fields(self)
        owner = "OptimizerConfig"
        for name in ("warmup", "decay"):
            if (part := getattr(self, name)) > 1.0 and part % 1.0:
                raise InputError(
                    f"{owner}.{name}: expected a fraction of all steps below 1 or a whole number "
                    f"of steps, found {part}"
                )
        if self.muon_learning_rate and self.learning_rate == 0.0:
            raise InputError(
                f"{owner}.muon_learning_rate: it scales the schedule of learning_rate, which is "
                f"0; found {self.muon_learning_rate}, expected learning_rate above 0"
            )
        used = {
            "adamw": ("beta1", "beta2"),
            "muon": ("beta1", "beta2", "muon_momentum"),
            "lion": ("lion_beta2",),
        }
        for name in used[self.kind] if self.moment_dtype == "bfloat16" else ():
            if getattr(self, name) > LARGEST_BFLOAT16_BETA:
                raise InputError(
                    f"{owner}.{name}: bfloat16 moments cannot decay by {getattr(self, name)}, they "
                    f"round back to themselves; expected at most {LARGEST_BFLOAT16_BETA}, or "
                    'moment_dtype "float32"'
                )

    def phases(self, steps: int) -> tuple[int, int]:
        """Number of steps of the warmup, and of the decay of "wsd" (0 for other schedules).

        Parts that fit before they are rounded to whole steps fit: the decay is then cut by a step.
        """
        parts = (self.warmup, self.decay if self.schedule == "wsd" else 0.0)
        warmup, decay = (count_of(part, steps) for part in parts)
        # A relative error of 1e-9 is more than that of decimal fractions, such as 0.3 + 0.7.
        if sum(p * steps if p < 1.0 else p for p in parts) <= steps * (1.0 + 1e-9):
            decay = min(decay, steps - warmup)
        if warmup + decay > steps:
            raise InputError(
                f"OptimizerConfig: warmup of {warmup} and decay of {decay} steps do not fit into "
                f"{steps} steps; lower warmup or decay"
            )
        return warmup, decay

    def continued(self, at: int, steps: int, first: int) -> OptimizerConfig:
        """The optimizer of a run that continues another one, warmup and decay in whole steps.

        `at` of its `steps` are done; the first run, which began at step 0, had `first`. No part of
        its schedule moves into the steps that are done: a fraction of `warmup` is one of the first
        run, so that the warmup stays where it was, and a fraction of `decay` is cut to the steps
        that are left.
        """
        warmup = min(count_of(self.warmup, first if self.warmup < 1.0 else steps), steps)
        decay = count_of(self.decay, steps) if self.schedule == "wsd" else 0
        if decay > steps - at and self.decay >= 1.0:
            raise InputError(
                f"OptimizerConfig.decay: {decay:,} steps do not fit into the {steps - at:,} steps "
                f"that are left of {steps:,} at step {at:,}; lower decay, train more steps, or "
                "continue from an earlier checkpoint"
            )
        if self.decay < 1.0:
            decay = min(decay, steps - max(at, warmup))
        return dataclasses.replace(self, warmup=float(warmup), decay=float(decay))

    @property
    def muon_ratio(self) -> float:
        """`muon_learning_rate` over `learning_rate`; 1 where they are the same."""
        if self.muon_learning_rate is None or self.muon_learning_rate == self.learning_rate:
            return 1.0
        return self.muon_learning_rate / self.learning_rate


def moment_bytes(config: OptimizerConfig, parameters: int, block_matrices: int) -> float:
    """Bytes of the optimizer's moments, without a few scalars.

    Muon has one moment of the blocks' matrices (`training.optimizer.is_block_matrix`), and
    AdamW's two of the other parameters.
    """
    single = {"adamw": 0, "lion": parameters, "muon": block_matrices}[config.kind]
    return float(MOMENT_BYTES[config.moment_dtype] * (2 * parameters - single))
