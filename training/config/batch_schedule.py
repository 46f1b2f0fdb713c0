"""A run as phases of one batch shape each: what the schedules of batch size and length mean.

A phase says which rows of the data's endless order its steps read, so the data offset of any
step is a pure function of the configuration and a resumed run reads what it would have read.
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
    """Steps with batches of one shape.

    Attributes:
        first: steps done before the phase.
        end: steps done after it.
        rows: of the data in a batch, each of `TrainConfig.sequence_length` tokens.
        pieces: sequences that a row is cut into.
        data_offset: of the phase's first row in the data's order.
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
        """Rows of the stored batch that hold the rows `rows` of the batch that is trained on."""
        import numpy as np

        return np.unique(rows // self.pieces)

    def cut(self, read: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """int32 [read, length] -> [rows, length / pieces], in the order of the text.

        Args:
            read: the rows `read_rows(rows)` of the stored batch.
            rows: of the batch that is trained on, ascending.
        """
        if self.pieces == 1:
            return read
        import numpy as np

        pieces = read.reshape(len(read) * self.pieces, -1)
        first = np.searchsorted(self.read_rows(rows), rows // self.pieces) * self.pieces
        return pieces[first + rows % self.pieces]


def batch_phases(train: TrainConfig) -> tuple[BatchPhase, ...]:
    """The batch phases of a run, in order: all of its steps, without an end if it has none."""
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
