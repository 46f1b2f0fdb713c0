"""The training budget: epochs or tokens converted to optimizer steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import InputError
from steps.artifacts import Sequences
from steps.declared import check_length, nearest_setting
from training.config import TrainConfig
from training.config.batch_schedule import step_that_reads

MOST_EPOCHS = 4
"""Up to this many epochs, repeated tokens are nearly as good as new ones (Muennighoff et al., 2023,
arXiv:2305.16264)."""


def told_epochs(epochs: Sequence[float]) -> str:
    """A warning for data that is read more often than `MOST_EPOCHS`; else empty."""
    if max(epochs, default=0.0) <= MOST_EPOCHS:
        return ""
    which = "the data is" if len(epochs) == 1 else f"source {epochs.index(max(epochs)) + 1} is"
    return (
        f"{which} read {max(epochs):,.1f} times: tokens that are repeated more than {MOST_EPOCHS} "
        "times lower the loss less than new ones; sample more, or train less"
    )


def check_budget(arguments: Mapping[str, Any]) -> None:
    """Refuse a missing budget, more than one, or one that is not positive."""
    steps = arguments["train"].steps
    given = {name: arguments[name] for name in ("epochs", "tokens") if arguments[name] is not None}
    if len(given) > 1:
        raise InputError("train: expected one of epochs and tokens, found both; leave one out")
    if not given and not steps:
        raise InputError(
            "train: expected a budget, found none; give epochs=1, or tokens=..., or "
            "TrainConfig(steps=...)"
        )
    for name, value in given.items():
        if not value > 0:
            raise InputError(f"train: {name}={value}: expected more than 0")
    if "epochs" in given and nearest_setting(arguments["sequences"], "weights") is not None:
        raise InputError("train: a mixture has no epochs; give tokens=... instead")


def resolved(
    train: TrainConfig, sequences: Sequences, epochs: float | None = None, tokens: int | None = None
) -> TrainConfig:
    """The configuration with the sequences' length and seed, and the budget as steps.

    `TrainConfig.steps`, if set, is the budget.
    """
    length = sequences.result["sequence_length"]
    check_length(train, length)
    # JAX's keys have 32 bits of a seed; a shuffle's may have more.
    seed = sequences.result["seed"] % 2**32 if train.seed is None else train.seed
    train = dataclasses.replace(train, sequence_length=length, seed=seed)
    return budgeted(train, sequences.result["sequences"], epochs, tokens)


def budgeted(
    train: TrainConfig, available: int | None, epochs: float | None, tokens: int | None
) -> TrainConfig:
    """`train`, which has a sequence length, with the budget as steps.

    The number of `available` sequences may be None for a budget of tokens.
    """
    if train.steps:
        return train
    length, there = train.sequence_length, available or 0
    budget = int(epochs * there) if epochs is not None else (tokens or 0) // length
    steps = steps_of(budget, train)
    if not steps:
        known = "" if available is None else f"there are {available:,}; "
        raise InputError(
            f"train: a budget of {budget:,} sequences of {length:,} tokens is less than one batch "
            f"of {train.batch_size}; {known}lower batch_size or sample more"
        )
    return dataclasses.replace(train, steps=steps)


def steps_of(budget: int, train: TrainConfig) -> int:
    """Whole steps of `budget` sequences, by the batch sizes of `train`, which sets no steps."""
    _, step, _ = step_that_reads(train, budget)
    return step - 1
