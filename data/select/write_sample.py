"""Writes the sampled documents of units: one Parquet file per split (id, text, token_count).

For finding duplicates there is `<split>.hashes.npy` beside it (uint64 [documents, 3]: hash of the
text in two words, hash of the id).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.arrays import load_array
from data.read.parquet_table import read_table
from data.read.unit import Unit
from data.read.work_units import INVALID, NULL
from data.select.document_hash import document_hash
from data.select.hash_histogram import above_score
from data.select.hash_ranges import Ranges, select
from data.select.split_writer import COLUMNS, Splits
from pipeline.store import storage

EMPTY_TEXT = "empty text"
OUTSIDE = "outside the ranges"
DUPLICATE = "duplicate text"


def below(min_score: float) -> str:
    """The drop reason of a document with a lower score."""
    return f"score below {min_score:g}"


def sample_units(
    units: Sequence[Unit],
    splits: Ranges | str,
    directory: str,
    *,
    seed: int,
    min_score: float | None = None,
    keep_hashes: bool = False,
    columns: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Write the sampled documents of some units to `<directory>/<split>.parquet`, in their order.

    A document of white space only is dropped.

    Args:
        splits: the hash ranges of the splits, or the name of one split for all documents.
        keep_hashes: write the hashes that `data.select.duplicates` needs.
        columns: other columns of the units to write.

    Returns:
        `splits`: for each split with documents `documents`, `tokens` (by `token_count`), `bytes`
        (UTF-8 of the text) and `digest` (see `rows_digest`). `seen`: number of documents.
        `dropped`: number of documents by reason; with the documents written they add up to `seen`.
        `row_groups_read`: row groups whose text was read; `text_bytes_read`: their uncompressed
        bytes of text by the footer. With `columns` also `measured`, which is no part of a content
        digest, with the type by column (`columns`), to compare the files of several calls.
    """
    dropped = {EMPTY_TEXT: 0}
    if isinstance(splits, Ranges):
        dropped[OUTSIDE] = 0
    if min_score is not None:
        dropped[below(min_score)] = 0
    tally = Counter[str]()
    with ExitStack() as stack:
        out = Splits(directory, stack, keep_hashes=keep_hashes)
        # Text files share batches, and their rows are written one by one, as if they did not.
        for files, some in groupby(units, lambda unit: unit.kind == "text"):
            for rows, batch in above_score(some, (*COLUMNS, *columns), min_score, tally):
                if min_score is not None:
                    dropped[below(min_score)] += rows - batch.num_rows
                places = document_hash(batch.column("id"), seed)
                for name, kept in _by_split(batch, places, splits, dropped):
                    found = batch.take(pa.array(kept)).select([*COLUMNS, *columns])
                    out.write(name, found, places[kept], apart=files)
        counts = out.finish()
    dropped |= {reason: tally[reason] for reason in (NULL, INVALID) if tally[reason]}
    return {
        "splits": counts,
        "seen": tally["rows"],
        "dropped": dropped,
        "row_groups_read": sum(len(unit.row_groups) for unit in units),
        "text_bytes_read": sum(unit.text_bytes for unit in units),
        **({"measured": {"columns": out.columns}} if columns else {}),
    }


def drop_rows(source: str, lost: dict[str, np.ndarray], directory: str) -> dict[str, Any]:
    """Rewrite a sampled unit without some rows (int64, ascending, may be empty) of every split.

    Returns:
        `splits` as from `sample_units`, `dropped` with the number of documents dropped, and
        `dropped_splits`: `documents` and `tokens` dropped by split.
    """
    gone: dict[str, dict[str, int]] = {}
    with ExitStack() as stack:
        out = Splits(directory, stack)
        for split, rows in lost.items():
            first = tokens = 0
            for batch in read_table(storage.join(source, f"{split}.parquet")):
                inside = np.arange(first, first + batch.num_rows)
                kept = np.flatnonzero(~np.isin(inside, rows))
                if len(kept):
                    out.write(split, batch.take(pa.array(kept)))
                counts = batch.column("token_count").to_numpy()
                tokens += int(counts.sum() - counts[kept].sum())
                first += batch.num_rows
            gone[split] = {"documents": len(rows), "tokens": tokens}
        counts = out.finish()
    return {
        "splits": counts,
        "dropped": {DUPLICATE: sum(part["documents"] for part in gone.values())},
        "dropped_splits": gone,
    }


def read_hashes(directory: str, split: str) -> np.ndarray:
    """uint64 [documents, 3] of a sampled unit's split: text hash (two words) and id hash."""
    return load_array(storage.join(directory, f"{split}.hashes.npy"))


def _by_split(
    batch: pa.RecordBatch, places: np.ndarray, splits: Ranges | str, dropped: dict[str, int]
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, rows) of each split with rows in the batch; adds the other rows to `dropped`."""
    if isinstance(splits, Ranges):
        names, where = splits.names, select(places, splits)
        dropped[OUTSIDE] += int((where < 0).sum())
    else:
        names, where = (splits,), np.zeros(batch.num_rows, np.int16)
    # A text is empty that has no character, or only white space as defined by `str.isspace`.
    texts = batch.column("text")
    space = pc.call_function("utf8_is_space", [texts]).to_numpy(zero_copy_only=False)
    empty = space | (pc.call_function("binary_length", [texts]).to_numpy() == 0)
    empty &= where >= 0
    dropped[EMPTY_TEXT] += int(empty.sum())
    where[empty] = -1
    for index, name in enumerate(names):
        rows = np.flatnonzero(where == index)
        if len(rows):
            yield name, rows
