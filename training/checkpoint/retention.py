"""Selects the checkpoints to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import InputError
from training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules for which checkpoints stay when a newer one is committed; one matching rule is enough.

    Attributes:
        newest: number of newest checkpoints to keep.
        every: keep also the steps that are a multiple of it; 0 for none.
        milestones: steps to keep always.
    """

    newest: int = 2
    every: int = 0
    milestones: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.newest < 1:
            raise InputError(f"Retention.newest: expected at least 1, got {self.newest}")
        if self.every < 0:
            raise InputError(f"Retention.every: expected at least 0, got {self.every}")
        if any(step < 1 for step in self.milestones):
            raise InputError(
                f"Retention.milestones: expected steps of at least 1, got {self.milestones}"
            )

    @staticmethod
    def of(config: TrainConfig) -> Retention:
        """The rules of a run's configuration."""
        return Retention(
            newest=config.keep_checkpoints, every=config.keep_every, milestones=config.milestones
        )

    def dropped(self, steps: Sequence[int]) -> list[int]:
        """Indices into `steps` of the checkpoints to drop.

        Args:
            steps: steps of all existing checkpoints, oldest first.
        """
        old = range(max(0, len(steps) - self.newest))
        return [p for p in old if not stays(steps[p], self.every, self.milestones)]


def stays(step: int, keep_every: int, milestones: Sequence[int]) -> bool:
    """Whether the checkpoint of `step` is never dropped: a milestone, or a kept multiple."""
    return step in milestones or (keep_every > 0 and step % keep_every == 0)


def kept_for_good(step: int, train: TrainConfig) -> bool:
    """Whether the checkpoint of `step` exists after the run, however it was split into attempts."""
    return step == train.steps or stays(step, train.keep_every, train.milestones)


def due(step: int, train: TrainConfig) -> bool:
    """Whether to save a checkpoint after `step`, counted from 1."""
    return step % train.checkpoint_every == 0 or kept_for_good(step, train)
