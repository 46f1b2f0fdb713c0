"""Exact duplicates: decides which copy of a text is kept, independent of the order of the files.

The copy in the held-out split named first is kept, or one in train if no held-out split has a copy.
Within a split the copy with the smallest document hash is kept, so a larger sample keeps the same
copies as a smaller one, since the documents it adds have larger hashes. Samples of whole row groups
are in the order of their walk instead, and the first copy of the walk is kept. Copies with the same
id are the same document, and the first one is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Documents compared at once: about 1 GiB of memory.
_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Part:
    """The documents of one split in one file.

    Attributes:
        rank: rank of its split; the copy with the lowest rank is kept.
        documents: number of documents.
        load: reads their hashes, uint64 [documents, 3] (see `data.select.write_sample`).
    """

    rank: int
    documents: int
    load: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Found:
    """The duplicates among all documents.

    Attributes:
        lost: index of a part -> its rows to drop, int64 ascending; parts without any are absent.
        repeated_ids: number of documents whose id an earlier document has too.
    """

    lost: Mapping[int, np.ndarray]
    repeated_ids: int


def find_duplicates(
    parts: Sequence[Part], *, by_position: bool = False, at_once: int = _AT_ONCE
) -> Found:
    """Compare the texts of all documents by their hashes.

    Args:
        parts: all parts of the sample, in the order of their names.
        by_position: keep the first copy of a split in the order of parts and rows, instead of the
            copy with the smallest document hash.
        at_once: about how many documents to compare at a time; the hashes of all parts are read
            again for each such share.
    """
    shares = max(1, -(-sum(part.documents for part in parts) // at_once))
    found = [np.empty((2, 0), np.int64)]
    repeated = 0
    for share in range(shares):
        texts, ids = _of_share(parts, share, shares)
        repeated += len(ids) - len(np.unique(ids))
        found.append(np.stack(_losers(*texts, by_position)))
    numbers, rows = np.concatenate(found, axis=1)
    order = np.lexsort((rows, numbers))
    numbers, rows = numbers[order], rows[order]
    losing, begins = np.unique(numbers, return_index=True)
    lost = dict(zip(losing.tolist(), np.split(rows, begins)[1:], strict=True))
    return Found(lost=lost, repeated_ids=repeated)


def _of_share(
    parts: Sequence[Part], share: int, shares: int
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """((hashes, rank, part, row) of the documents with texts in a share, id hashes in the share).

    A share is the hashes equal to `share` modulo `shares`, so equal texts are in the same share.
    """
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
    """(part, row) of every document to drop, since another copy of its text is kept."""
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
    # Sort by text and then by preference: of a run of equal texts, all but the first are dropped.
    order = np.lexsort(keys[::-1])
    texts = hashes[order, :2]
    lost = order[1:][(texts[1:] == texts[:-1]).all(axis=1)]
    return parts[lost], rows[lost]


def _repeated(words: np.ndarray) -> np.ndarray:
    """Indices of words that occur more than once: few, so that sorting by all keys is cheap."""
    order = np.argsort(words)
    same = words[order[1:]] == words[order[:-1]]
    mark = np.zeros(len(words), bool)
    mark[order[1:][same]] = True
    mark[order[:-1][same]] = True
    return np.flatnonzero(mark)
