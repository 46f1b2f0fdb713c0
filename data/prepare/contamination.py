"""Removes what documents share with evaluation sets: the document, or the text around the n-grams.

The second is the rule of Brown et al. 2020, appendix C: the n-gram and 200 characters on either
side are removed, which cuts a document into pieces. Pieces of fewer than 200 characters are
dropped, and so are documents cut into more than 10. Their exception for n-grams of more than ten
documents is not made, because what happens to a document would then depend on all others.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data.prepare.items import DocumentItem, DocumentWriter, read_documents
from data.prepare.ngrams import Hits, Table, find_hits, make_table
from data.prepare.words import words
from data.read.parquet_table import read_table
from pipeline.store import storage

_TABLE = "table.npz"
CUT = "cut into too many pieces"
SHORT = "left too short"
_EXAMPLES = 3  # of an evaluation set in one shard


class Cut(NamedTuple):
    """How spans are removed."""

    margin: int  # characters to remove on either side of an n-gram; words in which they end go too
    least: int  # characters of the shortest piece that is kept
    most: int  # pieces of a document that is kept


def table_shard(directory: str, work: tuple[Mapping[str, str], int, int]) -> Mapping[str, Any]:
    """Shard writer: the n-grams of all evaluation sets, of which it gets the URLs of the texts."""
    files, ngram, least = work
    table, counts = make_table({name: read_table(f) for name, f in files.items()}, ngram, least)
    with storage.open_write(storage.join(directory, _TABLE)) as file:
        np.savez(file, lengths=table.lengths, hashes=table.hashes, owners=table.owners)
    return {"sets": {name: count._asdict() for name, count in counts.items()}}


@functools.lru_cache(1)
def _table(directory: str) -> Table:
    with storage.open_read(storage.join(directory, _TABLE)) as file:
        saved = np.load(file, allow_pickle=False)
        return Table(tuple(saved["lengths"].tolist()), saved["hashes"], saved["owners"])


def clean_shard(
    directory: str, work: tuple[DocumentItem, str, Sequence[str], Cut | None]
) -> Mapping[str, Any]:
    """Shard writer: the item's documents without what the evaluation sets contain.

    `work` has the directory of the table, the names of the sets, and how to cut; None drops.
    """
    item, table, names, cut = work
    tally, found = Counter[str](), dict[str, Any]()
    counts = Counter[str](documents=0, pieces=0, tokens=0)
    with DocumentWriter(directory) as out:
        for split, batch in read_documents(item, tally):
            out.read(batch)
            hits = find_hits(_table(table), batch.column("text"))
            count_hits(found, names, batch, hits)
            if cut is None:
                left, dropped = drop_documents(batch, hits, names)
            else:
                left, dropped = cut_documents(batch, hits, cut)
            gone = {reason: batch.take(rows) for reason, rows in dropped.items()}
            for reason, rows in gone.items():
                out.drop(reason, rows)
            out.write(split, left)
            hit = len(set(hits.text.tolist()))
            counts["documents"] += hit - sum(rows.num_rows for rows in gone.values())
            counts["pieces"] += left.num_rows - (batch.num_rows - hit)
            counts["tokens"] += _tokens(batch) - _tokens(left) - sum(map(_tokens, gone.values()))
        out.skip(tally)
    return {**out.result, "contamination": found, "cut": counts}


def _tokens(batch: pa.RecordBatch) -> int:
    return int(batch.column("token_count").to_numpy().sum())


def pieces(text: str, begins: np.ndarray, ends: np.ndarray, margin: int) -> list[tuple[int, int]]:
    """(begin, end) of what is left of a text without spans of characters, in its order.

    `begins` are ascending. Pieces have no white space at their ends and are not empty.
    """
    inside = words(pa.array([text], pa.string()))
    left, last = 0, len(text)
    kept = []
    for begin, end in zip(
        np.maximum(begins - margin, 0), np.minimum(ends + margin, last), strict=True
    ):
        word = np.searchsorted(inside.end, begin, side="right")  # first that ends behind it
        if word < len(inside.start):
            begin = min(begin, inside.start[word])
        word = np.searchsorted(inside.start, end, side="left") - 1  # last that begins before it
        if word >= 0:
            end = max(end, inside.end[word])
        kept.append((left, int(begin)))
        left = max(left, int(end))
    found = []
    for begin, end in (*kept, (left, last)):
        if piece := text[begin:end].strip():
            begin = text.index(piece, begin)
            found.append((begin, begin + len(piece)))
    return found


def drop_documents(
    batch: pa.RecordBatch, hits: Hits, names: Sequence[str]
) -> tuple[pa.RecordBatch, dict[str, list[int]]]:
    """(documents without hits, rows of the others by reason, the set of the first n-gram)."""
    rows, first = np.unique(hits.text, return_index=True)
    dropped: dict[str, list[int]] = {}
    for row, owner in zip(rows.tolist(), hits.owner[first].tolist(), strict=True):
        dropped.setdefault(f"contains text of {names[owner]}", []).append(row)
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


def count_hits(
    found: dict[str, Any], names: Sequence[str], batch: pa.RecordBatch, hits: Hits
) -> None:
    """Add to `found`, for each evaluation set with hits in the documents of a batch, `documents`,
    `hits` (n-grams, each time that one occurs) and `examples`: id, and the text of the first one.
    """
    if not len(hits.text):
        return
    pairs = np.stack([hits.owner, hits.text])
    pairs, first, count = np.unique(pairs, axis=1, return_index=True, return_counts=True)
    for (owner, row), at, ngrams in zip(pairs.T.tolist(), first, count.tolist(), strict=True):
        own = found.setdefault(names[owner], {"documents": 0, "hits": 0, "examples": []})
        own["documents"] += 1
        own["hits"] += ngrams
        if len(own["examples"]) < _EXAMPLES:
            text = batch.column("text")[row].as_py()[hits.start[at] : hits.end[at]]
            own["examples"].append({"id": batch.column("id")[row].as_py(), "text": text})
