"""Divides a run into batch phases, and says after which steps a checkpoint is saved and kept.

A phase defines the rows of the data's endless order that its steps read. The data offset of a step
is therefore a pure function of the configuration, and a resumed run reads the same rows. A row is a
stored sequence of `TrainConfig.sequence_length` tokens, cut into one or more training sequences.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.config.train import TrainConfig

if TYPE_CHECKING:
    import numpy as np


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


@dataclass(frozen=True)
class BatchPhase:
    """Consecutive steps, `first` to `end`, with batches of one shape.

    Attributes:
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
        """int32 [read, length] of `read_rows(rows)` -> [rows, length / pieces], in their order."""
        if self.pieces == 1:
            return read
        import numpy as np

        # Training sequence n is piece n % pieces of stored row n // pieces.
        pieces = read.reshape(len(read) * self.pieces, -1)
        first = np.searchsorted(self.read_rows(rows), rows // self.pieces) * self.pieces
        return pieces[first + rows % self.pieces]


def largest_of(phases: Sequence[BatchPhase]) -> BatchPhase:
    """The phase whose steps need the most memory: most tokens, then the longest sequences."""
    return max(phases, key=lambda phase: (phase.rows, -phase.pieces))


def rows_read(train: TrainConfig, step: int) -> int:
    """Rows of the data that the first `step` steps read."""
    phase = next(phase for phase in reversed(batch_phases(train)) if phase.first <= step)
    return phase.data_offset + (step - phase.first) * phase.rows


def batch_phases(train: TrainConfig) -> tuple[BatchPhase, ...]:
    """The batch phases of a run in order; the last has no end if `train.steps` is 0."""
    shapes, data_offset = train.batch_shapes, 0
    ends = [*(first for first, _, _ in shapes[1:]), train.steps or sys.maxsize]
    found: list[BatchPhase] = []
    for (first, rows, pieces), end in zip(shapes, ends, strict=True):
        found.append(BatchPhase(first, end, rows, pieces, data_offset))
        data_offset += (end - first) * rows
    return tuple(found)


def read_by(train: TrainConfig, step: int) -> tuple[BatchPhase, range]:
    """The phase of a step, counted from 1, and the positions in the data's order that it reads."""
    phase = next(phase for phase in reversed(batch_phases(train)) if phase.first < step)
    begin = phase.data_offset + (step - 1 - phase.first) * phase.rows
    return phase, range(begin, begin + phase.rows)


def step_that_reads(train: TrainConfig, position: int) -> tuple[BatchPhase, int, int]:
    """The inverse of `read_by`: the phase, the step, and which of the step's rows is `position`."""
    phase = next(p for p in reversed(batch_phases(train)) if p.data_offset <= position)
    batch, row = divmod(position - phase.data_offset, phase.rows)
    return phase, phase.first + 1 + batch, row
