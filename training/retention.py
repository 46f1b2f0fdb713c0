"""Which checkpoints stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import InputError


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

    def dropped(self, steps: Sequence[int]) -> list[int]:
        """Positions in `steps` of the checkpoints to drop.

        Args:
            steps: of all checkpoints there are, oldest first.
        """
        old = range(max(0, len(steps) - self.newest))
        return [position for position in old if not self._stays(steps[position])]

    def _stays(self, step: int) -> bool:
        return step in self.milestones or (self.every > 0 and step % self.every == 0)


def due(step: int, every: int, milestones: Sequence[int] = ()) -> bool:
    """Whether a checkpoint is to be saved after `step`.

    Args:
        step: counted from 1.
        every: steps between checkpoints, at least 1.
        milestones: further steps at which one is saved.
    """
    return step % every == 0 or step in milestones
