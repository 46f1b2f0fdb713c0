"""Rows of conversations: packed by best fit, none in two rows, in the format of a masked cache.

An id that is not predicted is stored as id + `vocab_size`, and the first of a conversation, and of
a row's padding, as id + 2 `vocab_size`: attention begins there (`training.step.train_step`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.batches.packing import best_fit
from data.chat.encoder import Encoded

WHOLE, CUT, TRUNCATED, UNPREDICTED = "whole", "cut", "truncated", "unpredicted"


def shortened(conversation: Encoded, length: int) -> tuple[Encoded, str]:
    """At most `length` tokens of a conversation, and what became of it.

    It is `CUT` behind the last whole turn of the assistant that fits, or without one `TRUNCATED`;
    `UNPREDICTED` if it has nothing to predict then.
    """
    ids, predicted = conversation
    what = WHOLE
    if len(ids) > length:
        ends = np.flatnonzero(predicted[:length] & ~predicted[1 : length + 1])
        what, size = (CUT, int(ends[-1]) + 1) if len(ends) else (TRUNCATED, length)
        ids, predicted = ids[:size], predicted[:size]
    predicted = predicted & (np.arange(len(ids)) > 0)  # nothing is before the first
    return Encoded(ids, predicted), what if predicted.any() else UNPREDICTED


def places(conversations: Sequence[Encoded], length: int) -> tuple[np.ndarray, np.ndarray]:
    """The row of each conversation, and where in it the conversation begins: int64 (n,) both."""
    sizes = np.array([len(each.ids) for each in conversations], np.int64)
    rows = best_fit(sizes, length)
    begins, filled = np.empty_like(rows), np.zeros(int(rows.max(initial=-1)) + 1, np.int64)
    for index, (row, size) in enumerate(zip(rows.tolist(), sizes.tolist(), strict=True)):
        begins[index] = filled[row]
        filled[row] += size
    return rows, begins


def pack_rows(conversations: Sequence[Encoded], length: int, vocab_size: int) -> np.ndarray:
    """Rows int64 [row, length] of conversations of at most `length` tokens each."""
    at, begins = places(conversations, length)
    rows = np.full((int(at.max(initial=-1)) + 1, length), vocab_size, np.int64)
    for (ids, predicted), row, begin in zip(conversations, at, begins.tolist(), strict=True):
        rows[row, begin : begin + len(ids)] = np.where(predicted, ids, ids + vocab_size)
        rows[row, begin] = ids[0] + 2 * vocab_size
    filled = np.bincount(at, [len(each.ids) for each in conversations], len(rows)).astype(int)
    padded = np.flatnonzero(filled < length)
    rows[padded, filled[padded]] += vocab_size
    return rows
