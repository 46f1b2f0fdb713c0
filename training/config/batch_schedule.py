"""Divides a run into batch phases, one for each batch shape of its two schedules.

A phase defines the rows of the data's endless order that its steps read. The data offset of a step
is therefore a pure function of the configuration, and a resumed run reads the same rows. A row is a
stored sequence of `TrainConfig.sequence_length` tokens, cut into one or more training sequences.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.config.train import TrainConfig

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class BatchPhase:
    """Consecutive steps with batches of one shape.

    Attributes:
        first: steps done before the phase.
        end: steps done after the phase.
        rows: rows of the data in a batch.
        pieces: sequences that each row is cut into.
        data_offset: offset of the phase's first row in the data's order.
    """

    first: int
    end: int
    rows: int
    pieces: int
    data_offset: int

    def config(self, train: TrainConfig) -> TrainConfig:
        """The run's configuration with this phase's batch shape."""
        return dataclasses.replace(
            train,
            batch_size=self.rows * self.pieces,
            sequence_length=train.sequence_length // self.pieces,
            batch_schedule=(),
            length_schedule=(),
        )

    def read_rows(self, rows: np.ndarray) -> np.ndarray:
        """The stored rows that contain the training sequences `rows`, indices in the batch."""
        import numpy as np

        return np.unique(rows // self.pieces)

    def cut(self, read: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """int32 [read, length] -> [rows, length / pieces]; pieces of a row keep their order.

        Args:
            read: the stored rows of `read_rows(rows)`.
            rows: indices of training sequences in the batch, ascending.
        """
        if self.pieces == 1:
            return read
        import numpy as np

        # Training sequence n is piece n % pieces of stored row n // pieces.
        pieces = read.reshape(len(read) * self.pieces, -1)
        first = np.searchsorted(self.read_rows(rows), rows // self.pieces) * self.pieces
        return pieces[first + rows % self.pieces]


def largest_phase(train: TrainConfig) -> BatchPhase:
    """The phase whose steps need the most memory: most tokens, then the longest sequences."""
    return max(batch_phases(train), key=lambda phase: (phase.rows, -phase.pieces))


def batch_phases(train: TrainConfig) -> tuple[BatchPhase, ...]:
    """The batch phases of a run in order; the last has no end if `train.steps` is 0."""
    steps = train.steps or sys.maxsize
    sizes, cuts = dict(train.batch_schedule), dict(train.length_schedule)
    firsts = sorted(step for step in {0, *sizes, *cuts} if step < steps)
    found: list[BatchPhase] = []
    rows, pieces, data_offset = train.batch_size, 1, 0
    for first, end in zip(firsts, [*firsts[1:], steps], strict=True):
        rows, pieces = sizes.get(first, rows), cuts.get(first, pieces)
        found.append(BatchPhase(first, end, rows, pieces, data_offset))
        data_offset += (end - first) * rows
    return tuple(found)
