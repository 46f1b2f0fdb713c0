"""Removes what documents share with evaluation sets: the document, or the text around the n-grams.

The second is the rule of Brown et al. 2020, appendix C: the n-gram and 200 characters on either
side are removed, which cuts a document into pieces. Pieces of fewer than 200 characters are
dropped, and so are documents cut into more than 10. Their exception for n-grams of more than ten
documents is not made, because what happens to a document would then depend on all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data.prepare.ngrams import Hits
from data.prepare.words import words

CUT = "cut into too many pieces"
SHORT = "left too short"
_EXAMPLES = 3  # of an evaluation set in one shard


class Cut(NamedTuple):
    """How spans are removed.

    Attributes:
        margin: characters to remove on either side of an n-gram; a word in which they end goes too.
        least: characters of the shortest piece that is kept.
        most: pieces of a document that is kept.
    """

    margin: int
    least: int
    most: int


def overlap(name: str) -> str:
    """The drop reason of a document whose first n-gram of an evaluation set is one of `name`."""
    return f"contains text of {name}"


def pieces(text: str, begins: np.ndarray, ends: np.ndarray, margin: int) -> list[tuple[int, int]]:
    """(begin, end) of what is left of a text without spans of characters, in its order.

    `begins` are ascending. Pieces have no white space at their ends and are not empty.
    """
    found = words(pa.array([text], pa.string()))
    left, last = 0, len(text)
    kept = []
    for begin, end in zip(
        np.maximum(begins - margin, 0), np.minimum(ends + margin, last), strict=True
    ):
        inside = np.searchsorted(found.end, begin, side="right")  # first word that ends behind it
        if inside < len(found.start):
            begin = min(begin, found.start[inside])
        inside = np.searchsorted(found.start, end, side="left") - 1  # last that begins before it
        if inside >= 0:
            end = max(end, found.end[inside])
        kept.append((left, int(begin)))
        left = max(left, int(end))
    stripped = [_stripped(text, begin, end) for begin, end in (*kept, (left, last))]
    return [(begin, end) for begin, end in stripped if begin < end]


def _stripped(text: str, begin: int, end: int) -> tuple[int, int]:
    while begin < end and text[begin].isspace():
        begin += 1
    while begin < end and text[end - 1].isspace():
        end -= 1
    return begin, end


def drop_documents(
    batch: pa.RecordBatch, hits: Hits, names: Sequence[str]
) -> tuple[pa.RecordBatch, dict[str, list[int]]]:
    """(documents without hits, rows of the others by reason, the set of the first n-gram)."""
    rows, first = np.unique(hits.text, return_index=True)
    dropped: dict[str, list[int]] = {}
    for row, owner in zip(rows.tolist(), hits.owner[first].tolist(), strict=True):
        dropped.setdefault(overlap(names[owner]), []).append(row)
    kept = np.ones(batch.num_rows, bool)
    kept[rows] = False
    return batch.filter(pa.array(kept)), dropped


def cut_documents(
    batch: pa.RecordBatch, hits: Hits, cut: Cut
) -> tuple[pa.RecordBatch, dict[str, list[int]]]:
    """(documents that are left, rows of those dropped by reason) of a batch.

    The pieces of a document follow each other and are documents of their own, with the ids
    `<id>/0`, `<id>/1` and so on if they are several. A piece has the share of `token_count` that
    its bytes are of the text's.
    """
    texts, ids = batch.column("text"), batch.column("id")
    counts = batch.column("token_count").to_numpy()
    dropped: dict[str, list[int]] = {}
    rows, made = list[int](), list[tuple[str, str, int]]()
    hit = set(hits.text.tolist())
    for row in range(batch.num_rows):
        text, name, count = texts[row].as_py(), ids[row].as_py(), int(counts[row])
        if row not in hit:
            rows.append(row)
            made.append((name, text, count))
            continue
        here = hits.text == row
        found = pieces(text, hits.start[here], hits.end[here], cut.margin)
        long = [text[begin:end] for begin, end in found if end - begin >= cut.least]
        if len(found) > cut.most or not long:
            dropped.setdefault(CUT if len(found) > cut.most else SHORT, []).append(row)
            continue
        for number, piece in enumerate(long):
            share = max(1, round(count * len(piece.encode()) / len(text.encode())))
            made.append((f"{name}/{number}" if len(long) > 1 else name, piece, share))
            rows.append(row)
    left = batch.take(pa.array(rows, pa.int64()))
    for index, field in enumerate(("id", "text", "token_count")):
        at = left.schema.get_field_index(field)
        values = pa.array([each[index] for each in made], left.schema.field(at).type)
        left = left.set_column(at, left.schema.field(at), values)
    return left, dropped


class Overlaps:
    """Counts of hits by evaluation set, with examples."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._found: dict[str, dict[str, Any]] = {}

    def add(self, batch: pa.RecordBatch, hits: Hits) -> None:
        """Count the hits of the documents of a batch."""
        if not len(hits.text):
            return
        pairs = np.stack([hits.owner, hits.text])
        pairs, first, count = np.unique(pairs, axis=1, return_index=True, return_counts=True)
        for (owner, row), at, ngrams in zip(pairs.T.tolist(), first, count.tolist(), strict=True):
            found = self._found.setdefault(
                self._names[owner], {"documents": 0, "hits": 0, "examples": []}
            )
            found["documents"] += 1
            found["hits"] += ngrams
            if len(found["examples"]) < _EXAMPLES:
                text = batch.column("text")[row].as_py()[hits.start[at] : hits.end[at]]
                found["examples"].append({"id": batch.column("id")[row].as_py(), "text": text})

    def result(self) -> dict[str, Any]:
        """For each set with hits `documents`, `hits` (n-grams, each time that one occurs) and
        `examples` of documents: id, and the text of the first n-gram."""
        return self._found
