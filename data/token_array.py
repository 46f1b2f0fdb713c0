"""The shards of a split as one long array of tokens, joined by reference.

Making one touches no storage, whatever the number of shards: their lengths come from the caller.
A shard is opened when a window first falls on it, and must then be what it was said to be. All
reads of a call are under way together, in one TensorStore batch, which is what makes many short
reads fast; decoded chunks stay in a cache of bounded size, since neighbouring windows share them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import tensorstore as ts

from data.cache import TOKENS, open_array, settle, token_dtype
from pipeline.errors import DamagedOutput


class TokenArray:
    """Random access to the tokens of many shards. Safe to read from several threads.

    Args:
        shards: (directory, tokens) of every shard, in order.
        vocab_size: of the tokenizer; decides the shards' dtype.
        cache_bytes: limit of decoded chunks kept in memory.
        timeout_s: longest wait for one read.
    """

    def __init__(
        self,
        shards: Sequence[tuple[str, int]],
        vocab_size: int,
        *,
        cache_bytes: int = 256 << 20,
        timeout_s: float = 600.0,
    ) -> None:
        self.vocab_size = vocab_size
        self._directories = [directory for directory, _ in shards]
        self._ends = np.cumsum(np.array([tokens for _, tokens in shards], np.int64))
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
        self._timeout_s = timeout_s
        self._opened: dict[int, ts.TensorStore] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Windows of the joined array, which may cross the ends of shards.

        Args:
            starts: int64 (n,), position of each window's first token.
            length: tokens in a window.

        Returns:
            int32 (n, length).

        Raises:
            IndexError: a window is not inside the array.
            DamagedOutput: a shard is not what was written.
            StorageError: the store failed, or took longer than `timeout_s`.
        """
        starts = np.asarray(starts, np.int64)
        if starts.size and (starts.min() < 0 or starts.max() + length > len(self)):
            raise IndexError(f"expected windows inside [0, {len(self)}), got starts {starts}")
        windows = np.empty((len(starts), length), np.int32)
        pieces = self._pieces(starts, length)
        self._open({shard for shard, *_ in pieces})
        with ts.Batch() as batch:
            pending = [
                self._opened[shard][begin : begin + size].read(batch=batch)
                for shard, begin, size, _, _ in pieces
            ]
        for (shard, _, size, row, column), future in zip(pieces, pending, strict=True):
            tokens = settle(future, self._directories[shard], self._timeout_s)
            windows[row, column : column + size] = tokens
        return windows

    def _pieces(self, starts: np.ndarray, length: int) -> list[tuple[int, int, int, int, int]]:
        """(shard, begin in the shard, size, row, column) of every stretch inside one shard."""
        # The side skips empty shards: their end is the end of the shard before.
        shards = np.searchsorted(self._ends, starts, side="right")
        pieces = []
        for row, (start, shard) in enumerate(zip(starts.tolist(), shards.tolist(), strict=True)):
            column = 0
            while column < length:
                end = int(self._ends[shard])
                first = int(self._ends[shard - 1]) if shard else 0
                size = min(length - column, end - start - column)
                if size:
                    pieces.append((shard, start + column - first, size, row, column))
                column += size
                shard += 1
        return pieces

    def _open(self, shards: set[int]) -> None:
        with self._lock:
            opening = {
                shard: open_array(self._directories[shard], TOKENS, self._context)
                for shard in sorted(shards - self._opened.keys())
            }
            for shard, future in opening.items():
                array = settle(future, self._directories[shard], self._timeout_s)
                self._check(shard, array)
                self._opened[shard] = array

    def _check(self, shard: int, array: ts.TensorStore) -> None:
        declared = int(np.diff(self._ends, prepend=0)[shard])
        expected = f"{declared} tokens of {token_dtype(self.vocab_size).name}"
        found = f"{array.shape[0]} tokens of {array.dtype.name}"
        if found != expected:
            raise DamagedOutput(
                f"{self._directories[shard]}: expected {expected}, found {found}; "
                "rebuild the step that wrote it"
            )
