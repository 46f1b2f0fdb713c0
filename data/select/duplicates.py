"""Exact duplicates: which copies of a text go, whatever the order of the files.

Of the documents with one text the copy stays that is in the held-out split named first; in train
when no held-out split has one. Within a split the copy with the smallest document hash stays, so a
larger sample keeps what the smaller one kept: what it adds lies farther on. Samples of whole row
groups lie in the order of their walk instead, and there the first copy of the walk stays. Copies
that share the id too are the same document, and the one met first stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Documents compared at once: about 1 GiB of memory.
_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Part:
    """The documents of one split in one file.

    Attributes:
        rank: of its split; the copy in the lowest stays.
        documents: how many.
        load: reads their hashes, uint64 [documents, 3] (see `data.select.write_sample`).
    """

    rank: int
    documents: int
    load: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Found:
    """What a comparison of all documents found.

    Attributes:
        lost: index of a part -> its rows that go, int64 ascending; parts that keep all are absent.
        repeated_ids: documents whose id an earlier document has too.
    """

    lost: Mapping[int, np.ndarray]
    repeated_ids: int


@dataclass
class _Losers:
    by_part: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def add(self, parts: np.ndarray, rows: np.ndarray) -> None:
        order = np.lexsort((rows, parts))
        parts, rows = parts[order], rows[order]
        for part in np.unique(parts):
            begin, end = np.searchsorted(parts, [part, part + 1])
            self.by_part.setdefault(int(part), []).append(rows[begin:end])


def find_duplicates(
    parts: Sequence[Part], *, by_position: bool = False, at_once: int = _AT_ONCE
) -> Found:
    """Compare the texts of all documents by their hashes.

    Args:
        parts: of the whole sample, in the order of their names.
        by_position: the order of parts and rows says which copy of a split stays, instead of the
            document hash.
        at_once: about how many documents to compare at a time; every part's hashes are read again
            for each such share.
    """
    shares = max(1, -(-sum(part.documents for part in parts) // at_once))
    losers = _Losers()
    repeated = 0
    for share in range(shares):
        texts, ids = _of_share(parts, share, shares)
        repeated += len(ids) - len(np.unique(ids))
        losers.add(*_losers(*texts, by_position))
    lost = {part: np.sort(np.concatenate(rows)) for part, rows in losers.by_part.items()}
    return Found(lost=dict(sorted(lost.items())), repeated_ids=repeated)


def _of_share(
    parts: Sequence[Part], share: int, shares: int
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """((hashes, rank, part, row) of the documents whose text is in a share, ids that are in it)."""
    hashes, ranks, numbers, rows, ids = [], [], [], [], []
    for number, part in enumerate(parts):
        found = part.load()
        mine = np.flatnonzero(found[:, 0] % np.uint64(shares) == share)
        hashes.append(found[mine])
        ranks.append(np.full(len(mine), part.rank, np.int16))
        numbers.append(np.full(len(mine), number, np.int64))
        rows.append(mine.astype(np.int64))
        ids.append(found[found[:, 2] % np.uint64(shares) == share, 2])
    if not parts:
        empty = np.empty(0, np.int64)
        return (np.empty((0, 3), np.uint64), empty, empty, empty), empty
    joined = (np.concatenate(column) for column in (hashes, ranks, numbers, rows))
    return (*joined,), np.concatenate(ids)  # pyrefly: ignore[bad-return]


def _losers(
    hashes: np.ndarray, ranks: np.ndarray, parts: np.ndarray, rows: np.ndarray, by_position: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(part, row) of every document whose text another one keeps."""
    repeated = _repeated(hashes[:, 0])
    hashes, ranks, parts, rows = (a[repeated] for a in (hashes, ranks, parts, rows))
    keys = [
        hashes[:, 0],
        hashes[:, 1],
        ranks,
        *([] if by_position else [hashes[:, 2]]),
        parts,
        rows,
    ]
    order = np.lexsort(keys[::-1])
    texts = hashes[order, :2]
    lost = order[1:][(texts[1:] == texts[:-1]).all(axis=1)]
    return parts[lost], rows[lost]


def _repeated(words: np.ndarray) -> np.ndarray:
    """Indices of the words that occur more than once: few, so that only they are sorted in full."""
    order = np.argsort(words)
    same = words[order[1:]] == words[order[:-1]]
    mark = np.zeros(len(words), bool)
    mark[order[1:][same]] = True
    mark[order[:-1][same]] = True
    return np.flatnonzero(mark)
