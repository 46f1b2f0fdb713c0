"""The order of training: maps a position in the run to a row of the token array.

A pure function of seed and position, the same for any number of processes; each epoch visits every
row once, in its own order. `BlockShuffle` trades randomness for read locality: it permutes blocks
of neighbouring rows over the whole set, then rows inside windows of `window_blocks` blocks, which
bounds what one window reads. Blocks of one row, or one window over all, give a full shuffle.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from data.batches.feistel import FeistelPermutation, derive_key
from pipeline.errors import InputError

_TABLE = 4096  # rows in a table, which takes half a millisecond and 32 KB
_MAX_TABLES = 4  # positions that span more tables than this are computed without tables
_CACHED = 256  # tables and permutations kept; enough for many sources, 8 MB of tables


@dataclass(frozen=True, kw_only=True)
class BlockShuffle:
    """A shuffle, different in every epoch, whose reads stay inside a window.

    Attributes:
        io_block_size: neighbouring rows that stay together until the second permutation.
        window_blocks: blocks whose rows are permuted together; a loader that caches a window of
            `io_block_size * window_blocks` sequences reads every row from storage once per epoch.
    """

    sequences: int
    io_block_size: int
    window_blocks: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("sequences", "io_block_size", "window_blocks"):
            if (value := getattr(self, name)) < 1:
                raise InputError(
                    f"BlockShuffle.{name}={value}: expected at least 1; give a larger value"
                )

    @property
    def blocks(self) -> int:
        return -(-self.sequences // self.io_block_size)

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """The row at each global position (int64, non-negative); epochs follow one another."""
        positions = np.asarray(positions, np.int64)
        if not positions.size:
            return positions.copy()
        low, high = int(positions.min()), int(positions.max())
        if low < 0:
            raise IndexError("expected positions of 0 or more")
        # A table costs one permutation per window in it, so small windows get short tables.
        size = min(_TABLE, 8 * self.window_blocks * self.io_block_size)
        epoch, low = divmod(low, self.sequences)
        high -= epoch * self.sequences
        if high >= self.sequences or high - low >= _MAX_TABLES * size:
            epochs, places = np.divmod(positions, self.sequences)
            rows = np.empty_like(positions)
            for each in np.unique(epochs):
                chosen = epochs == each
                rows[chosen] = self._rows_of_epoch(int(each), places[chosen])
            return rows
        first, last = low // size, high // size
        tables = [_table(self, epoch, number, size) for number in range(first, last + 1)]
        table = tables[0] if first == last else np.concatenate(tables)
        return table[positions - (epoch * self.sequences + first * size)]

    def place(self, row: int, epoch: int) -> int:
        """The place of a row in one epoch, the inverse of `rows`: its position less the epoch's."""
        missing = self.blocks * self.io_block_size - self.sequences
        order = _permutation(self.blocks, self.seed, epoch, "blocks", 0)
        block, offset = divmod(row, self.io_block_size)
        slot = int(order.inverse(np.array([block]))[0]) * self.io_block_size + offset
        # The steps of `_rows_of_epoch`, backwards.
        short_rank = _rank_of_last_block(order)
        window_size = self.window_blocks * self.io_block_size
        window, short_window = slot // window_size, short_rank // self.window_blocks
        if window == short_window and slot >= (short_rank + 1) * self.io_block_size:
            slot -= missing
        begin = window * window_size
        size = min(window_size, self.blocks * self.io_block_size - begin)
        size -= missing if window == short_window else 0
        inside = _permutation(size, self.seed, epoch, "window", window)
        slot = begin + int(inside.inverse(np.array([slot - begin]))[0])
        return slot - missing if window > short_window else slot

    def _rows_of_epoch(self, epoch: int, places: np.ndarray) -> np.ndarray:
        # The last block may lack `missing` rows, and the block permutation can put it anywhere.
        # A slot is a place in the permuted order as if all blocks were full. Before the window
        # permutation the missing slots are at the end of the short block's window, so that the
        # permutation runs over whole slots only; after it they move to the end of the short block.
        missing = self.blocks * self.io_block_size - self.sequences
        order = _permutation(self.blocks, self.seed, epoch, "blocks", 0)
        short_rank = _rank_of_last_block(order)
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
        first, last = int(ranks.min()), int(ranks.max())
        if last - first < len(ranks):  # rows share blocks: permuting the range of blocks is cheaper
            blocks = order(np.arange(first, last + 1))[ranks - first]
        else:
            blocks = order(ranks)
        return blocks * self.io_block_size + offsets


@functools.lru_cache(maxsize=_CACHED)
def _table(order: BlockShuffle, epoch: int, number: int, size: int) -> np.ndarray:
    """Rows (int64) at places number * size to (number + 1) * size of an epoch, or to its end."""
    places = np.arange(number * size, min((number + 1) * size, order.sequences))
    return order._rows_of_epoch(epoch, places)


@functools.lru_cache(maxsize=_CACHED)
def _rank_of_last_block(order: FeistelPermutation) -> int:
    return int(order.inverse(np.array([order.size - 1]))[0])


@functools.lru_cache(maxsize=_CACHED)
def _permutation(size: int, seed: int, epoch: int, what: str, window: int) -> FeistelPermutation:
    return FeistelPermutation(size, derive_key(seed, epoch, what, window))
