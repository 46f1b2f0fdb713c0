"""Selects the steps after which a checkpoint is saved, and the checkpoints to keep."""

from __future__ import annotations

from collections.abc import Sequence

from training.config import TrainConfig


def due(step: int, train: TrainConfig) -> bool:
    """Whether to save a checkpoint after `step`, counted from 1."""
    return step % train.checkpoint_every == 0 or kept_for_good(step, train)


def kept_for_good(step: int, train: TrainConfig) -> bool:
    """Whether the checkpoint of `step` exists after the run, however it was split into attempts."""
    multiple = train.keep_every > 0 and step % train.keep_every == 0
    return multiple or step in train.milestones or step == train.steps


def dropped(steps: Sequence[int], train: TrainConfig) -> list[int]:
    """Indices into `steps`, of all checkpoints from the oldest on, of those to drop."""
    old = steps[: -train.keep_checkpoints]
    return [index for index, step in enumerate(old) if not kept_for_good(step, train)]
