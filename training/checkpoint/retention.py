"""Which checkpoints stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import InputError
from training.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is kept when a newer checkpoint is committed; whatever one rule keeps is kept.

    Attributes:
        newest: this many newest checkpoints.
        every: of the others, those of a step that is a multiple of it; 0 for none.
        milestones: steps that are never dropped.
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
        """What a run's configuration keeps."""
        return Retention(
            newest=config.keep_checkpoints, every=config.keep_every, milestones=config.milestones
        )

    def dropped(self, steps: Sequence[int]) -> list[int]:
        """Positions in `steps` of the checkpoints to drop.

        Args:
            steps: of all checkpoints there are, oldest first.
        """
        old = range(max(0, len(steps) - self.newest))
        return [p for p in old if not stays(steps[p], self.every, self.milestones)]


def stays(step: int, keep_every: int, milestones: Sequence[int]) -> bool:
    """Whether the checkpoint of `step` is never dropped: a milestone, or a kept multiple."""
    return step in milestones or (keep_every > 0 and step % keep_every == 0)


def kept_for_good(step: int, train: TrainConfig) -> bool:
    """Whether the checkpoint of `step` is there in the end, whenever attempts began and ended."""
    return step == train.steps or stays(step, train.keep_every, train.milestones)


def due(step: int, train: TrainConfig) -> bool:
    """Whether a checkpoint is to be saved after `step`, counted from 1."""
    return step % train.checkpoint_every == 0 or kept_for_good(step, train)
