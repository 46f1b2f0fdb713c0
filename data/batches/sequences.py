"""The tokens of a split cut into rows of one sequence each, aligned to the chunks they are read in.

Rows of a shard begin at multiples of the row length inside it, so a row length that is a multiple
of the chunk size reads whole chunks only. The tails of a source's shards, `tokens % length` of
each, are joined in order and cut into the source's last rows. So every token is in exactly one row,
except `tokens % length` at the end of the joined tails.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from data.cache.token_array import TokenArray
from pipeline.errors import InputError


def row_count(shard_tokens: Sequence[int] | np.ndarray, length: int) -> int:
    """Number of whole rows of `length` in a source whose shards have `shard_tokens` tokens."""
    if length < 1:
        raise InputError(f"sequence_length={length}: expected at least 1; give a longer one")
    return int(np.sum(np.asarray(shard_tokens, np.int64))) // length


class SequenceReader:
    """Random access to the rows of a token array. Safe to read from several threads.

    `sources` has the number of consecutive shards of each source, and `counts` its rows, which are
    numbered source by source. None: all shards are one source.
    """

    def __init__(
        self, tokens: TokenArray, length: int, sources: Sequence[int] | None = None
    ) -> None:
        self._tokens = tokens
        self.length = length
        ends = np.asarray(tokens.shard_ends, np.int64)
        sizes = np.diff(ends, prepend=0)
        self._shard_ends = ends
        cuts = np.cumsum([0, *([len(ends)] if sources is None else sources)]).tolist()
        assert cuts[-1] == len(ends), "the sources' shards do not add up to the array's"
        spans = [slice(*cut) for cut in itertools.pairwise(cuts)]
        self._spans = spans
        self.counts = tuple(row_count(sizes[span], length) for span in spans)
        self.count = sum(self.counts)
        # A segment is the aligned rows of one shard. Each source ends with one more segment, for
        # the rows that are cut from its joined tails.
        after = [span.stop for span in spans]
        aligned = [int(np.sum(sizes[span] // length)) for span in spans]
        joined = [count - rows for count, rows in zip(self.counts, aligned, strict=True)]
        segment_rows = np.insert(sizes // length, after, joined)
        self._ends = np.cumsum(segment_rows)
        self._begins = self._ends - segment_rows
        # Row r of a segment of aligned rows begins at token `offset + r * length` of the array.
        self._offsets = np.insert(ends - sizes, after, 0) - self._begins * length
        # Of each source the tails of its shards as one array: where each ends in it, and what to
        # add to a place in it for the token's index in the token array.
        self._tails = {}
        for number, span in enumerate(spans):
            tails = np.cumsum(sizes[span] % length)
            self._tails[span.stop + number] = tails, ends[span] - tails
        self._is_joined = np.zeros(len(self._ends), bool)
        self._is_joined[list(self._tails)] = True

    def read(self, rows: np.ndarray) -> np.ndarray:
        """The tokens of rows in any order, with or without repeats: int32 (n, length)."""
        rows = np.asarray(rows, np.int64)
        if rows.size and (rows.min() < 0 or rows.max() >= self.count):
            raise IndexError(f"expected rows inside [0, {self.count}), got {rows}")
        out = np.empty((len(rows), self.length), np.int32)
        segments = np.searchsorted(self._ends, rows, side="right")
        starts = self._offsets[segments] + rows * self.length
        begin = 0
        # Aligned rows between the few joined ones are read directly into `out`, without a copy.
        for place in np.flatnonzero(self._is_joined[segments]).tolist():
            self._tokens.read(starts[begin:place], self.length, out[begin:place])
            pieces = self._joined_pieces(int(segments[place]), int(rows[place]))
            found = [self._tokens.read(np.array([start]), size)[0] for start, size in pieces]
            out[place] = np.concatenate(found)
            begin = place + 1
        self._tokens.read(starts[begin:], self.length, out[begin:])
        return out

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """(index in the token array, number of tokens) of each piece of a row, in order."""
        segment = int(np.searchsorted(self._ends, row, side="right"))
        if self._is_joined[segment]:
            return self._joined_pieces(segment, row)
        return [(int(self._offsets[segment]) + row * self.length, self.length)]

    def _joined_pieces(self, segment: int, row: int) -> list[tuple[int, int]]:
        ends, offsets = self._tails[segment]
        begin = (row - int(self._begins[segment])) * self.length
        end, found = begin + self.length, []
        tail = int(np.searchsorted(ends, begin, side="right"))
        while begin < end:
            size = min(end, int(ends[tail])) - begin
            if size > 0:
                found.append((int(offsets[tail]) + begin, size))
                begin += size
            tail += 1
        return found

    def rows_with(self, shard: int, begin: int, end: int) -> np.ndarray:
        """Rows that have any of the tokens `begin` to `end` - 1 of a shard: int64, ascending.

        The inverse of `pieces`. Tokens at the end of the joined tails may be in no row.
        """
        source = next(number for number, span in enumerate(self._spans) if shard < span.stop)
        segment, span = shard + source, self._spans[source]
        cut = int(self._ends[segment] - self._begins[segment]) * self.length
        found = [_rows(begin, min(end, cut), self.length) + self._begins[segment]]
        if end > cut:
            joined = span.stop + source
            start = int(self._shard_ends[shard - 1]) if shard else 0
            shift = start - int(self._tails[joined][1][shard - span.start])
            rows = _rows(max(begin, cut) + shift, end + shift, self.length) + self._begins[joined]
            found.append(rows[rows < self._ends[joined]])
        return np.concatenate(found)


def _rows(begin: int, end: int, length: int) -> np.ndarray:
    return np.arange(begin // length, -(-end // length) if end > begin else begin // length)
