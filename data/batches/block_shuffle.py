"""The order of training: from a position in the run to a row of the token array.

The tokens of a split are one long array, cut into rows of one sequence each. An order maps a
global position (batch * batch size + place in the batch) to a row, as a pure function of the seed
and that position: nothing is stored, resuming needs one integer, and every process of any number of
processes computes the same batch. Each epoch visits every row once, in an order of its own.

`BlockShuffle` trades randomness against locality of reading: blocks of neighbouring rows are
permuted over the whole set, then rows are permuted inside windows of so many blocks, so that what
a window reads from storage is bounded. Blocks of one row, or one window over all, shuffle fully.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from data.batches.feistel import FeistelPermutation, derive_key
from pipeline.errors import InputError

_TABLE = 4096  # rows in a table; it takes half a millisecond and 32 KB
_LOOKED_UP = 4  # tables; positions further apart than this are computed
_KEPT = 256  # tables, permutations; enough for a mixture of many sources, 8 MB of tables


@dataclass(frozen=True, kw_only=True)
class BlockShuffle:
    """A reshuffle in every epoch, whose reads stay inside a window.

    Attributes:
        sequences: rows in the set.
        io_block_size: neighbouring rows that stay together until the second permutation.
        window_blocks: blocks whose rows are permuted together; a loader that holds a window of
            `io_block_size * window_blocks` sequences in its cache reads everything once.
        seed: any integer.
    """

    sequences: int
    io_block_size: int
    window_blocks: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("sequences", "io_block_size", "window_blocks"):
            _at_least_one("BlockShuffle", name, getattr(self, name))

    @property
    def blocks(self) -> int:
        """Blocks in the set, the last one perhaps short."""
        return -(-self.sequences // self.io_block_size)

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """The row at each global position (int64, non-negative), epoch after epoch.

        Positions that lie together, as a batch's do, are looked up in tables of up to 4,096 rows
        that are made once; scattered ones are computed each for itself.
        """
        positions = np.asarray(positions, np.int64)
        if not positions.size:
            return positions.copy()
        low, high = int(positions.min()), int(positions.max())
        if low < 0:
            raise IndexError("expected positions of 0 or more")
        # Every window costs a permutation, so tables of small windows are short.
        size = min(_TABLE, 8 * self.window_blocks * self.io_block_size)
        epoch, low = divmod(low, self.sequences)
        high -= epoch * self.sequences
        if high >= self.sequences or high - low >= _LOOKED_UP * size:
            return self._computed(positions)
        first, last = low // size, high // size
        tables = [_table(self, epoch, number, size) for number in range(first, last + 1)]
        table = tables[0] if first == last else np.concatenate(tables)
        return table[positions - (epoch * self.sequences + first * size)]

    def _computed(self, positions: np.ndarray) -> np.ndarray:
        epochs, places = np.divmod(positions, self.sequences)
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            rows[chosen] = self._rows_of_epoch(int(epoch), places[chosen])
        return rows

    def _rows_of_epoch(self, epoch: int, places: np.ndarray) -> np.ndarray:
        missing = self.blocks * self.io_block_size - self.sequences
        # The short block may come anywhere. Slots are places as if it were whole: they jump over
        # its missing rows, which lie at the end of its window until that window is permuted.
        short_rank = _rank_of_last_block(self.blocks, self.seed, epoch)
        window_size = self.window_blocks * self.io_block_size
        short_window = short_rank // self.window_blocks
        end = min((short_window + 1) * window_size, self.blocks * self.io_block_size) - missing
        slots = np.where(places >= end, places + missing, places)
        windows = slots // window_size
        for window in np.unique(windows):
            chosen = windows == window
            begin = int(window) * window_size
            size = min(window_size, self.blocks * self.io_block_size - begin)
            size -= missing if window == short_window else 0
            inside = _permutation(size, self.seed, epoch, "window", int(window))
            slots[chosen] = begin + inside(slots[chosen] - begin)
        after_short = slots >= (short_rank + 1) * self.io_block_size - missing
        slots = np.where((windows == short_window) & after_short, slots + missing, slots)
        ranks, offsets = np.divmod(slots, self.io_block_size)
        return self._blocks_at(epoch, ranks) * self.io_block_size + offsets

    def _blocks_at(self, epoch: int, ranks: np.ndarray) -> np.ndarray:
        block_order = _permutation(self.blocks, self.seed, epoch, "blocks", 0)
        first, last = int(ranks.min()), int(ranks.max())
        if last - first < len(ranks):  # rows share blocks: fewer blocks than rows to permute
            return block_order(np.arange(first, last + 1))[ranks - first]
        return block_order(ranks)


@functools.lru_cache(maxsize=_KEPT)
def _table(order: BlockShuffle, epoch: int, number: int, size: int) -> np.ndarray:
    """The rows at an epoch's places from number * size to the next table or the end, int64."""
    places = np.arange(number * size, min((number + 1) * size, order.sequences))
    return order._rows_of_epoch(epoch, places)


@functools.lru_cache(maxsize=_KEPT)
def _rank_of_last_block(blocks: int, seed: int, epoch: int) -> int:
    order = _permutation(blocks, seed, epoch, "blocks", 0)
    return int(order.inverse(np.array([blocks - 1]))[0])


@functools.lru_cache(maxsize=_KEPT)
def _permutation(size: int, seed: int, epoch: int, stage: str, window: int) -> FeistelPermutation:
    return FeistelPermutation(size, derive_key(seed, epoch, stage, window))


def _at_least_one(owner: str, name: str, value: int) -> None:
    if value < 1:
        raise InputError(f"{owner}.{name}={value}: expected at least 1; give a larger value")
