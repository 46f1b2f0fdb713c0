"""Best-fit packing: places documents into rows of one sequence, cutting only overlong documents.

Packing (Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv:2404.10830) cuts a
document only when it is longer than a row, into whole rows and a remainder. Remainders are placed
longest first, each into the row it fills best (of equally full ones the one filled last), or into a
new row. The free end of a row is padded with EOS.

A row that begins with the start of a document has an EOS in front of it, so that every document is
read after an EOS (see `training.step.train_step`). A piece that does not end with EOS fills its
row. Pieces of a row are in document order, rows in the order of their last pieces: the format of a
token shard, in which padding reads as empty documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from pipeline.errors import InputError


class Packing(NamedTuple):
    """The row of every piece of the documents, int64 (pieces,) each; sorted by row and start."""

    starts: np.ndarray  # first token of the piece in the stream of documents
    lengths: np.ndarray
    rows: np.ndarray
    places: np.ndarray  # index in its row of the piece's first token

    @property
    def row_count(self) -> int:
        return int(self.rows[-1]) + 1 if len(self.rows) else 0

    @property
    def fronts(self) -> int:
        """Number of rows with an EOS in front of their first document."""
        return self.row_count - int((self.places == 0).sum())


def pack(offsets: np.ndarray, length: int) -> Packing:
    """Place documents into rows; a pure function of its arguments.

    `offsets`, int64 (documents + 1,), ascending, are the start of each document in the stream and
    the end of the last. A document includes its EOS.
    """
    starts, lengths, rests = _cut(offsets, length)
    rows = np.concatenate([np.arange(len(starts)), len(starts) + best_fit(rests[1], length - 1)])
    starts, lengths = (np.concatenate(pair) for pair in zip((starts, lengths), rests, strict=True))
    # Number rows by the order of their last pieces; sort pieces by row and start.
    last = np.full(int(rows.max()) + 1 if len(rows) else 0, -1)
    np.maximum.at(last, rows, starts)
    rank = np.empty_like(last)
    rank[np.argsort(last)] = np.arange(len(last))
    rows = rank[rows]
    order = np.lexsort((starts, rows))
    starts, lengths, rows = starts[order], lengths[order], rows[order]
    before = np.cumsum(lengths) - lengths
    first = np.searchsorted(rows, rows)  # the first piece of each piece's row
    fronts = np.isin(starts[first], offsets)
    return Packing(starts, lengths, rows, before - before[first] + fronts)


def fill(packing: Packing, tokens: np.ndarray, length: int, eos_id: int) -> np.ndarray:
    """The rows: [rows, length], dtype of `tokens`, padded with EOS."""
    filled = np.full(packing.row_count * length, eos_id, tokens.dtype)
    places = packing.rows * length + packing.places
    pieces = (packing.starts.tolist(), packing.lengths.tolist(), places.tolist())
    for start, size, place in zip(*pieces, strict=True):
        filled[place : place + size] = tokens[start : start + size]
    return filled.reshape(packing.row_count, length)


def documents_cut_by_packing(offsets: np.ndarray, length: int) -> int:
    """Number of documents that, with the EOS in front, are longer than a row."""
    return int((_sizes(offsets, length)[1] >= length).sum())


def documents_cut_by_joining(offsets: np.ndarray, length: int) -> int:
    """Number of documents cut in two or more when the stream is cut every `length` tokens."""
    begins, sizes = _sizes(offsets, length)
    return int((begins // length != (begins + sizes - 1) // length).sum())


def rows_of_next_fit(offsets: np.ndarray, length: int) -> int:
    """Rows of next-fit packing: a document that does not fit the open row opens another one."""
    starts, _, (_, rests) = _cut(offsets, length)
    rows, free = len(starts), 0
    for size in rests.tolist():
        if size > free:
            rows, free = rows + 1, length - 1
        free -= size
    return rows


def _sizes(offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    if length < 2:
        raise InputError(f"length={length}: expected rows of at least 2 tokens; give a larger one")
    offsets = np.asarray(offsets, np.int64)
    sizes = np.diff(offsets)
    assert (sizes > 0).all(), "a document has its EOS at least"
    return offsets[:-1], sizes


def _cut(
    offsets: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Starts and lengths of the pieces that fill a row, and those of the rests, in document order.

    A document and the EOS in front of it are cut every `length` tokens, so its first piece has one
    token less. A rest, or a whole document that is shorter than a row, has less than `length`.
    """
    begins, sizes = _sizes(offsets, length)
    whole = (sizes + 1) // length
    number = np.arange(int(whole.sum())) - np.repeat(np.cumsum(whole) - whole, whole)
    starts = np.repeat(begins, whole) + number * length - (number > 0)
    done = np.maximum(whole * length - 1, 0)  # tokens of the document in rows of its own
    left = np.flatnonzero(sizes > done)
    return starts, length - (number == 0), ((begins + done)[left], (sizes - done)[left])


def best_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """The bin, from 0, of every size of at most `length` by best-fit decreasing: int64 (sizes,)."""
    longest_first = np.argsort(-sizes, kind="stable")
    # Bins are grouped by free space, so the best fit is the first entry of `free` that is >= size.
    free: list[int] = []  # ascending, distinct: the free space of the open bins
    bins_with: list[list[int]] = [[] for _ in range(length)]
    opened, placed = 0, []
    for size in sizes[longest_first].tolist():
        at = bisect_left(free, size)
        if at < len(free):
            before = free[at]
            bins = bins_with[before]
            chosen = bins.pop()
            if not bins:
                del free[at]
        else:
            before, chosen = length, opened
            opened += 1
        left = before - size
        if left:
            bins = bins_with[left]
            if not bins:
                insort(free, left)
            bins.append(chosen)
        placed.append(chosen)
    found = np.empty(len(sizes), np.int64)
    found[longest_first] = placed
    return found
