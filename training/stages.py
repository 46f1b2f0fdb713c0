"""A run as stages of one batch shape each: what the schedules of batch size and length mean.

A stage says which rows of the data's endless order its steps read, so the data position of any
step is a pure function of the configuration and a resumed run reads what it would have read.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.config import TrainConfig

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Stage:
    """Steps with batches of one shape.

    Attributes:
        first: steps done before the stage.
        end: steps done after it.
        rows: of the data in a batch, each of `TrainConfig.sequence_length` tokens.
        pieces: sequences that a row is cut into.
        position: of the stage's first row in the data's order.
    """

    first: int
    end: int
    rows: int
    pieces: int
    position: int

    def config(self, train: TrainConfig) -> TrainConfig:
        """The run's configuration with this stage's batch shape."""
        return dataclasses.replace(
            train,
            batch_size=self.rows * self.pieces,
            sequence_length=train.sequence_length // self.pieces,
            batch_schedule=(),
            length_schedule=(),
        )

    def cut(self, rows: np.ndarray) -> np.ndarray:
        """int32 [rows, length] -> [rows * pieces, length / pieces], in the order of the text."""
        return rows.reshape(len(rows) * self.pieces, -1)


def stages(train: TrainConfig) -> tuple[Stage, ...]:
    """The stages of a run, in order, together all of its steps; without an end if it has none."""
    steps = train.steps or sys.maxsize
    sizes, cuts = dict(train.batch_schedule), dict(train.length_schedule)
    firsts = sorted(step for step in {0, *sizes, *cuts} if step < steps)
    found: list[Stage] = []
    rows, pieces, position = train.batch_size, 1, 0
    for first, end in zip(firsts, [*firsts[1:], steps], strict=True):
        rows, pieces = sizes.get(first, rows), cuts.get(first, pieces)
        found.append(Stage(first, end, rows, pieces, position))
        position += (end - first) * rows
    return tuple(found)
