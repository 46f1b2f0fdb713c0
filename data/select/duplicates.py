"""Exact duplicates: decides which copy of a text is kept, independent of the order of the files.

The copy in the held-out split named first is kept, or one in train if no held-out split has a copy;
within a split the one with the smallest document hash, so a larger sample keeps the same copies as
a smaller one. Samples of whole row groups keep the first copy of their walk instead. The hashes are
compared in shares, each by a task of its own; equal texts are in the same share, and so are equal
ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

AT_ONCE = 1 << 23
"""Documents to compare at once: about 1 GiB of memory."""

TEXT_WORDS = 5  # columns of `Share.texts`
_ROW_BITS = 32


class Part(NamedTuple):
    """The documents of one split in one file."""

    number: int  # its place among all parts of the sample, in the order of their names
    rank: int  # of its split; the copy with the lowest rank is kept
    hashes: np.ndarray  # uint64 [documents, 3], see `data.select.write_sample`


class Share(NamedTuple):
    """Documents of some parts whose texts are in one share, and ids that are."""

    texts: np.ndarray  # uint64 [documents, 5]: text hash (2 words), id hash, rank, part and row
    ids: np.ndarray  # uint64 [documents], their hashes


@dataclass(frozen=True)
class Duplicates:
    """The duplicates among all documents."""

    lost: Mapping[int, np.ndarray]  # number of a part -> its rows to drop, int64 ascending
    repeated_ids: int  # documents whose id an earlier document has too


def find_duplicates(parts: Iterable[Part], *, by_position: bool) -> Duplicates:
    """Compare the texts of all documents, in this process.

    `by_position` keeps the first copy of a split in the order of parts and rows, instead of the
    copy with the smallest document hash.
    """
    return join(compare([share], by_position) for share in by_share(parts, 1))


def by_share(parts: Iterable[Part], shares: int) -> list[Share]:
    """The documents of some parts, divided into shares by their hashes modulo the number."""
    texts, ids = [np.empty((0, TEXT_WORDS), np.uint64)], [np.empty(0, np.uint64)]
    for part in parts:
        places = np.arange(len(part.hashes), dtype=np.uint64) + np.uint64(part.number << _ROW_BITS)
        texts.append(np.column_stack([part.hashes, np.full_like(places, part.rank), places]))
        ids.append(part.hashes[:, 2])
    joined, names = np.concatenate(texts), np.concatenate(ids)
    divided = _divided(joined, joined[:, 0], shares), _divided(names, names, shares)
    return [Share(*share) for share in zip(*divided, strict=True)]


def _divided(rows: np.ndarray, hashes: np.ndarray, shares: int) -> list[np.ndarray]:
    if shares == 1:
        return [rows]
    share = hashes % np.uint64(shares)
    order = np.argsort(share, kind="stable")
    ends = np.searchsorted(share[order], np.arange(1, shares, dtype=np.uint64))
    return np.split(rows[order], ends)


def compare(pieces: Sequence[Share], by_position: bool) -> tuple[np.ndarray, int]:
    """Of one share, all of whose documents are in `pieces`: (int64 [2, documents], part and row of
    every document to drop; number of documents whose id another one has too)."""
    texts, ids = pieces[0]
    if len(pieces) > 1:
        texts, ids = (np.concatenate(words) for words in zip(*pieces, strict=True))
    return _losers(texts, by_position), len(ids) - len(np.unique(ids))


def join(shares: Iterable[tuple[np.ndarray, int]]) -> Duplicates:
    lost, repeated = [np.empty((2, 0), np.int64)], 0
    for each, ids in shares:
        lost.append(each)
        repeated += ids
    numbers, rows = np.concatenate(lost, axis=1)
    order = np.lexsort((rows, numbers))
    numbers, rows = numbers[order], rows[order]
    losing, begins = np.unique(numbers, return_index=True)
    found = dict(zip(losing.tolist(), np.split(rows, begins)[1:], strict=True))
    return Duplicates(lost=found, repeated_ids=repeated)


def repeated(words: np.ndarray) -> np.ndarray:
    """int64: indices of the words that occur more than once, ascending.

    They are few, so that sorting them by more keys is cheap.
    """
    order = np.argsort(words)
    same = words[order[1:]] == words[order[:-1]]
    mark = np.zeros(len(words), bool)
    mark[order[1:][same]] = True
    mark[order[:-1][same]] = True
    return np.flatnonzero(mark)


def _losers(texts: np.ndarray, by_position: bool) -> np.ndarray:
    """int64 [2, n]: (part, row) of every document to drop, since another copy of it is kept."""
    texts = texts[repeated(texts[:, 0])]
    # Sort by text and then by preference: of a run of equal texts, all but the first are dropped.
    order = np.lexsort([texts[:, n] for n in ((4, 3, 1, 0) if by_position else (4, 2, 3, 1, 0))])
    same = (texts[order[1:], :2] == texts[order[:-1], :2]).all(axis=1)
    places = texts[order[1:][same], 4]
    rows = places & np.uint64((1 << _ROW_BITS) - 1)
    return np.stack([places >> np.uint64(_ROW_BITS), rows]).astype(np.int64)
