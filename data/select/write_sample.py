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

from data.read.parquet_table import TableWriter, read_table
from data.read.unit import Unit
from data.read.work_units import INVALID, NULL
from data.select.document_hash import digest_hex, document_hash, rows_digest, text_hash
from data.select.hash_histogram import above_score
from data.select.hash_ranges import Ranges, select
from pipeline.store import storage

EMPTY_TEXT = "empty text"
OUTSIDE = "outside the ranges"
DUPLICATE = "duplicate text"

SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string()), ("token_count", pa.int64())])


def below(min_score: float) -> str:
    """The drop reason of a document with a lower score."""
    return f"score below {min_score:g}"


class _SplitWriter:
    """Writes the documents of one split and counts them; `table` is to be entered and left."""

    def __init__(self, directory: str, split: str, keep_hashes: bool) -> None:
        self._base = storage.join(directory, split)
        self.table = TableWriter(f"{self._base}.parquet", SCHEMA)
        self._hashes: list[np.ndarray] | None = [] if keep_hashes else None
        self._documents = self._tokens = 0
        self._digest = 0
        self._bytes = 0

    def write(
        self, batch: pa.RecordBatch, places: np.ndarray | None = None, apart: bool = False
    ) -> None:
        """Append documents, with their document hashes, which are required if hashes are kept.

        With `apart` every row is written separately, so that row groups and pages can end between
        rows; else they end only between batches.
        """
        step = 1 if apart else max(1, batch.num_rows)
        for row in range(0, batch.num_rows, step):
            self.table.write(batch.slice(row, step))
        contents = text_hash(batch.column("text"))
        self._digest += rows_digest(batch.column("id"), contents)
        self._documents += batch.num_rows
        self._tokens += int(batch.column("token_count").to_numpy().sum())
        self._bytes += int(pc.call_function("binary_length", [batch["text"]]).to_numpy().sum())
        if self._hashes is not None and places is not None:
            words = np.frombuffer(b"".join(contents), "<u8").astype(np.uint64).reshape(-1, 2)
            self._hashes.append(np.column_stack([words, places]))

    def finish(self) -> dict[str, Any]:
        """Write the hashes; returns the counts of the split."""
        if self._hashes is not None:
            save_array(f"{self._base}.hashes.npy", np.concatenate(self._hashes))
        return {
            "documents": self._documents,
            "tokens": self._tokens,
            "bytes": self._bytes,
            "digest": digest_hex(self._digest),
        }


class _Splits(dict[str, _SplitWriter]):
    """A writer for each split that has a document."""

    def __init__(self, directory: str, keep_hashes: bool, stack: ExitStack) -> None:
        self._new = lambda split: _SplitWriter(directory, split, keep_hashes)
        self._stack = stack

    def __missing__(self, split: str) -> _SplitWriter:
        self[split] = self._new(split)
        self._stack.enter_context(self[split].table)
        return self[split]

    def finish(self) -> dict[str, dict[str, Any]]:
        return {split: writer.finish() for split, writer in self.items()}


def sample_units(
    units: Sequence[Unit],
    splits: Ranges | str,
    directory: str,
    *,
    seed: int,
    min_score: float | None = None,
    keep_hashes: bool = False,
) -> dict[str, Any]:
    """Write the sampled documents of some units to `<directory>/<split>.parquet`, in their order.

    A document of white space only is dropped.

    Args:
        splits: the hash ranges of the splits, or the name of one split for all documents.
        keep_hashes: write the hashes that `data.select.duplicates` needs.

    Returns:
        `splits`: for each split with documents `documents`, `tokens` (by `token_count`), `bytes`
        (UTF-8 of the text) and `digest` (see `rows_digest`). `seen`: number of documents.
        `dropped`: number of documents by reason; with the documents written they add up to `seen`.
        `row_groups_read`: row groups whose text was read; `text_bytes_read`: their uncompressed
        bytes of text by the footer.
    """
    dropped = {EMPTY_TEXT: 0}
    if isinstance(splits, Ranges):
        dropped[OUTSIDE] = 0
    if min_score is not None:
        dropped[below(min_score)] = 0
    tally = Counter[str]()
    with ExitStack() as stack:
        out = _Splits(directory, keep_hashes, stack)
        # Text files share batches, and their rows are written one by one, as if they did not.
        for files, some in groupby(units, lambda unit: unit.kind == "text"):
            for rows, batch in above_score(some, SCHEMA.names, min_score, tally):
                if min_score is not None:
                    dropped[below(min_score)] += rows - batch.num_rows
                places = document_hash(batch.column("id"), seed)
                for name, kept in _by_split(batch, places, splits, dropped):
                    found = batch.take(pa.array(kept)).select(SCHEMA.names)
                    out[name].write(found, places[kept], apart=files)
        counts = out.finish()
    dropped |= {reason: tally[reason] for reason in (NULL, INVALID) if tally[reason]}
    return {
        "splits": counts,
        "seen": tally["rows"],
        "dropped": dropped,
        "row_groups_read": sum(len(unit.row_groups) for unit in units),
        "text_bytes_read": sum(unit.text_bytes for unit in units),
    }


def drop_rows(source: str, lost: dict[str, np.ndarray], directory: str) -> dict[str, Any]:
    """Rewrite a sampled unit without some rows (int64, ascending, may be empty) of every split.

    Returns:
        `splits` as from `sample_units`, `dropped` with the number of documents dropped, and
        `dropped_splits`: `documents` and `tokens` dropped by split.
    """
    gone: dict[str, dict[str, int]] = {}
    with ExitStack() as stack:
        out = _Splits(directory, False, stack)
        for split, rows in lost.items():
            first = tokens = 0
            for batch in read_table(storage.join(source, f"{split}.parquet")):
                inside = np.arange(first, first + batch.num_rows)
                kept = np.flatnonzero(~np.isin(inside, rows))
                if len(kept):
                    out[split].write(batch.take(pa.array(kept)))
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


def save_array(url: str, array: np.ndarray) -> None:
    """Write one array in NumPy's format, without pickle."""
    with storage.open_write(url) as file:
        np.save(file, array, allow_pickle=False)


def load_array(url: str) -> np.ndarray:
    """The array that `save_array` wrote."""
    with storage.open_read(url) as file:
        return np.load(file, allow_pickle=False)
