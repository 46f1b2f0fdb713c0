"""The optimizer of a run and the size of its state, without importing JAX."""

from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import Literal, get_args

from models.shape.validation import (
    BelowOne,
    Count,
    NotNegative,
    Positive,
    Share,
    Whole,
    check_fields,
)
from pipeline.errors import InputError

Kind = Literal["adamw", "muon", "lion"]
Role = Literal[
    "matrices", "embedding", "value_embedding", "head", "vectors", "residual_scale", "input_scale"
]
Schedule = Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ROLES: tuple[Role, ...] = get_args(Role)
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
POLAR_STEPS = 5  # iterations for which the coefficients of "polar_express" are optimal

# A bfloat16 number has 8 significant bits. Multiplied by a larger beta it can round back to itself,
# and a moment that should decay never changes.
LARGEST_BFLOAT16_BETA = 1.0 - 2.0**-8


def count_of(part: float, steps: int) -> int:
    """Number of steps: `part` of `steps` if below 1 (rounded to nearest), else `part` itself."""
    return round(part * steps) if part < 1.0 else int(part)


def check_part(field: str, part: float) -> None:
    """Raise `InputError` for what `count_of` would cut."""
    if part > 1.0 and part % 1.0:
        raise InputError(
            f"{field}: expected a fraction of all steps below 1 or a whole number of steps, found "
            f"{part}"
        )


@dataclass(frozen=True, kw_only=True)
class Group:
    """What the parameters of one role have of their own; None stands for `OptimizerConfig`'s.

    "matrices" are those of the blocks, "embedding" the tables of tokens (also a tied one) and of
    learned positions, "vectors" norms, biases and the rest; see `training.parameter_roles`.

    Attributes:
        kind: "adamw", "lion", or for "matrices" only "muon".
        learning_rate: peak learning rate, on the same schedule.
        weight_decay: of all parameters of the role, whether or not they would decay without it.
        beta1, beta2: AdamW's or Lion's.
        epsilon: added to AdamW's denominator.
    """

    kind: Kind | None = None
    learning_rate: NotNegative | None = None
    weight_decay: NotNegative | None = None
    beta1: BelowOne | None = None
    beta2: BelowOne | None = None
    epsilon: Positive | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimizer with decoupled weight decay and a learning-rate schedule.

    "adamw" (https://arxiv.org/abs/1711.05101) updates every parameter. "muon"
    (https://kellerjordan.github.io/posts/muon) updates the matrices of the blocks; embedding, head,
    norms and biases use AdamW with its fields, see `training.optimizer`. "lion"
    (https://arxiv.org/abs/2302.06675) updates every parameter; its update is a sign, so the paper
    advises a learning rate 3 to 10 times smaller than AdamW's and a weight decay as much larger.

    Each role of parameters may have settings of its own (`head=Group(learning_rate=0.004)`). Fields
    of kinds that no role has, and groups of roles that the model has not (a tied head), have no
    effect.

    Attributes:
        kind: "adamw", "muon" or "lion".
        learning_rate: peak learning rate.
        schedule: "cosine", "linear" (https://arxiv.org/abs/2502.15938), "wsd" (warmup, stable,
            decay: a constant rate with a linear tail, https://arxiv.org/abs/2404.06395),
            "inverse_sqrt" (https://arxiv.org/abs/1706.03762) or "constant".
        warmup: linear warmup; a fraction of all steps when below 1, else a number of steps.
        decay: length of the "wsd" tail; a fraction of all steps when below 1, else steps.
        decay_shape: of that tail, "linear" or "sqrt": 1 - sqrt(p), which falls faster at first
            (https://arxiv.org/abs/2405.18392).
        min_ratio: last rate over peak rate ("cosine", "linear", "wsd"), or lower bound of that
            ratio ("inverse_sqrt").
        beta1: decay of AdamW's mean of gradients.
        beta2: decay of AdamW's mean of squared gradients.
        epsilon: added to AdamW's denominator.
        weight_decay: decoupled decay of matrices; norms, biases and embeddings have none.
        decay_tables: whether weight decay applies to embeddings too, also to a tied one.
        weight_decay_schedule: "constant", or "linear" or "cosine" from `weight_decay` to 0 at the
            last step.
        cautious_decay: whether an element decays only where its update has its sign or is 0, so
            that both shrink it (https://arxiv.org/abs/2510.12402). This and the schedule are those
            of `weight_decay` and of "matrices"; other groups' own decay is constant and plain.
        clip_norm: maximum global gradient norm; larger gradients are scaled down to it.
        moment_dtype: dtype of moments between steps, "float32" or "bfloat16" (as in
            https://arxiv.org/abs/2412.19437, section 3.3.3); they are computed in float32.
        muon_learning_rate: peak learning rate of Muon's matrices, on the same schedule; None for
            `learning_rate`, which Moonshot shares too (https://arxiv.org/abs/2502.16982).
        muon_momentum: decay of the mean of gradients; 0.95 is Jordan's.
        muon_momentum_start, muon_momentum_warmup: that decay at step 0, and the steps of a linear
            rise from it; None and 0 for no rise.
        muon_momentum_end: that decay at the last step, reached linearly in the tail of "wsd"; None
            for no change there.
        muon_nesterov: whether to use Nesterov momentum; Jordan's choice.
        muon_steps: Newton-Schulz iterations, in the compute dtype; 5 is Jordan's.
        muon_iteration: "newton_schulz" with Jordan's coefficients in each iteration, or
            "polar_express" with the best ones for each (https://arxiv.org/abs/2505.16932), up to 5.
        muon_row_beta: decay of NorMuon's mean squares of an update's rows (the longer side, as in
            nanochat), by whose roots these are divided while the update keeps its norm
            (https://arxiv.org/abs/2510.05491). None for Muon.
        muon_rms: root mean square of a full-rank update, which is scaled by
            `muon_rms * sqrt(max(fan_in, fan_out))`; 0.2 is Moonshot's, near the RMS of AdamW's
            updates. None for Jordan's factor `sqrt(max(1, fan_out / fan_in))`, for a
            `muon_learning_rate` of about 0.02.
        lion_beta1: weight of the momentum in the update; 0.9 is the paper's.
        lion_beta2: decay of the momentum; 0.99 is the paper's.
        matrices, embedding, value_embedding, head, vectors, residual_scale, input_scale: settings
            of these roles; `matrices.learning_rate` has precedence over `muon_learning_rate`.
    """

    kind: Kind = "adamw"
    learning_rate: NotNegative = 3e-4
    schedule: Schedule = "cosine"
    warmup: NotNegative = 0.01
    decay: NotNegative = 0.2
    decay_shape: Literal["linear", "sqrt"] = "linear"
    min_ratio: Share = 0.1
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    decay_tables: bool = False
    weight_decay_schedule: Literal["constant", "linear", "cosine"] = "constant"
    cautious_decay: bool = False
    clip_norm: Positive = 1.0
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    muon_learning_rate: NotNegative | None = None
    muon_momentum: BelowOne = 0.95
    muon_momentum_start: BelowOne | None = None
    muon_momentum_warmup: Whole = 0
    muon_momentum_end: BelowOne | None = None
    muon_nesterov: bool = True
    muon_steps: Count = 5
    muon_rms: Positive | None = 0.2
    muon_iteration: Literal["newton_schulz", "polar_express"] = "newton_schulz"
    muon_row_beta: BelowOne | None = None
    lion_beta1: BelowOne = 0.9
    lion_beta2: BelowOne = 0.99
    matrices: Group = Group()
    embedding: Group = Group()
    value_embedding: Group = Group()
    head: Group = Group()
    vectors: Group = Group()
    residual_scale: Group = Group()
    input_scale: Group = Group()

    def __post_init__(self) -> None:
        check_fields(self)
        owner = "OptimizerConfig"
        for name in ("warmup", "decay"):
            check_part(f"{owner}.{name}", getattr(self, name))
        for name in ("muon_learning_rate", *(f"{role}.learning_rate" for role in ROLES)):
            if (rate := operator.attrgetter(name)(self)) and self.learning_rate == 0.0:
                raise InputError(
                    f"{owner}.{name}: it scales the schedule of learning_rate, which is 0; found "
                    f"{rate}, expected learning_rate above 0"
                )
        for role in ROLES:
            if role != "matrices" and getattr(self, role).kind == "muon":
                raise InputError(
                    f'{owner}.{role}.kind: expected "adamw" or "lion", found "muon", which updates '
                    "the matrices of blocks alone"
                )
        self._check_muon(owner)
        for name, beta in self._betas.items() if self.moment_dtype == "bfloat16" else ():
            if beta > LARGEST_BFLOAT16_BETA:
                raise InputError(
                    f"{owner}.{name}: bfloat16 moments cannot decay by {beta}, they round back to "
                    f"themselves; expected at most {LARGEST_BFLOAT16_BETA}, or moment_dtype "
                    '"float32"'
                )

    def _check_muon(self, owner: str) -> None:
        if (self.muon_momentum_start is None) != (self.muon_momentum_warmup == 0):
            raise InputError(
                f"{owner}: expected muon_momentum_start and muon_momentum_warmup together, found "
                f"{self.muon_momentum_start} and {self.muon_momentum_warmup} steps"
            )
        if self.muon_momentum_end is not None and (self.schedule != "wsd" or not self.decay):
            raise InputError(
                f"{owner}.muon_momentum_end: it is reached at the end of the tail of schedule "
                f'"wsd", found "{self.schedule}" with decay {self.decay}; change one of them'
            )
        if self.muon_iteration == "polar_express" and self.muon_steps > POLAR_STEPS:
            raise InputError(
                f'{owner}.muon_steps: "polar_express" has coefficients for {POLAR_STEPS} '
                f"iterations, found {self.muon_steps}"
            )

    @property
    def _betas(self) -> dict[str, float]:
        """Decays of moments by field, of all kinds that a role has."""
        of_muon = [f"muon_{n}" for n in ("momentum", "momentum_start", "momentum_end", "row_beta")]
        used = {"adamw": ("beta1", "beta2"), "lion": ("lion_beta2",), "muon": of_muon}
        names = [name for role in ROLES for name in used[str(self.group(role).kind)]]
        names += [f"{role}.{name}" for role in ROLES for name in ("beta1", "beta2")]
        return {name: operator.attrgetter(name)(self) or 0.0 for name in names}

    def group(self, role: Role) -> Group:
        """The settings of a role, each its own or the configuration's: no field is None."""
        return _group(self, role)

    @property
    def labels(self) -> dict[Role, str]:
        """The name of each role's update and of its state: the role, or a kind that they share."""
        return {
            role: role if getattr(self, role) != Group() else str(self.group(role).kind)
            for role in ROLES
        }

    def rate_ratio(self, role: Role) -> float:
        """The role's peak learning rate over `learning_rate`; 1 where they are the same."""
        rate = self.group(role).learning_rate or 0.0
        return 1.0 if rate == self.learning_rate else rate / self.learning_rate

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


@functools.lru_cache(1024)  # a plan asks thousands of times
def _group(config: OptimizerConfig, role: Role) -> Group:
    own: Group = getattr(config, role)
    kind = own.kind or ("adamw" if config.kind == "muon" and role != "matrices" else config.kind)
    names = ("learning_rate", "weight_decay", "beta1", "beta2", "epsilon")
    found = {name: getattr(config, name) for name in names} | {"kind": kind}
    if kind == "lion":
        found |= {"beta1": config.lion_beta1, "beta2": config.lion_beta2}
    if kind == "muon" and config.muon_learning_rate is not None:
        found["learning_rate"] = config.muon_learning_rate
    found |= {name: value for name, value in vars(own).items() if value is not None}
    return Group(**found)
