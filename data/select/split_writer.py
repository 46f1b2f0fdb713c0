"""Writes documents as one Parquet file per split: id, text, token_count and other columns.

For finding duplicates there is `<split>.hashes.npy` beside it (uint64 [documents, 3]: hash of the
text in two words, hash of the id).
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.arrays import save_array
from data.read.parquet_table import TableWriter
from data.select.document_hash import digest_hex, rows_digest, text_hash
from pipeline.errors import InputError
from pipeline.store import storage

COLUMNS = ("id", "text", "token_count")


class SplitWriter:
    """Writes the documents of one split and counts them; `table` is to be entered and left."""

    def __init__(self, directory: str, split: str, schema: pa.Schema, keep_hashes: bool) -> None:
        self.schema = schema
        self._base = storage.join(directory, split)
        self.table = TableWriter(f"{self._base}.parquet", schema)
        self._hashes: list[np.ndarray] | None = [] if keep_hashes else None
        self._counts = Counter[str]()
        self._digest = 0

    def write(
        self, batch: pa.RecordBatch, places: np.ndarray | None = None, *, apart: bool = False
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
        self._counts.update(
            documents=batch.num_rows,
            tokens=int(batch.column("token_count").to_numpy().sum()),
            bytes=int(pc.call_function("binary_length", [batch["text"]]).to_numpy().sum()),
        )
        if self._hashes is not None and places is not None:
            words = np.frombuffer(b"".join(contents), "<u8").astype(np.uint64).reshape(-1, 2)
            self._hashes.append(np.column_stack([words, places]))

    def finish(self) -> dict[str, Any]:
        """Write the hashes; returns the counts of the split."""
        if self._hashes is not None:
            save_array(f"{self._base}.hashes.npy", np.concatenate(self._hashes))
        return {**self._counts, "digest": digest_hex(self._digest)}


class Splits:
    """A writer for each split that has a document; opened and left with the stack."""

    def __init__(self, directory: str, stack: ExitStack, *, keep_hashes: bool = False) -> None:
        self._directory = directory
        self._stack = stack
        self._keep_hashes = keep_hashes
        self._writers: dict[str, SplitWriter] = {}

    def write(
        self,
        split: str,
        batch: pa.RecordBatch,
        places: np.ndarray | None = None,
        *,
        apart: bool = False,
    ) -> None:
        """See `SplitWriter.write`; the first batch of a split has the columns of its file."""
        if split not in self._writers:
            writer = SplitWriter(self._directory, split, batch.schema, self._keep_hashes)
            self._stack.enter_context(writer.table)
            self._writers[split] = writer
        if batch.schema != (first := next(iter(self._writers.values())).schema):
            raise InputError(
                f"documents: expected the columns {first.names} of types "
                f"{[str(kind) for kind in first.types]}, as in the first file, found "
                f"{batch.schema.names} of {[str(kind) for kind in batch.schema.types]}; give all "
                "files of the source the same columns"
            )
        self._writers[split].write(batch, places, apart=apart)

    @property
    def columns(self) -> dict[str, str]:
        """Type by column; empty before the first document."""
        schemas = [writer.schema for writer in self._writers.values()]
        return {field.name: str(field.type) for schema in schemas[:1] for field in schema}

    def finish(self) -> dict[str, dict[str, Any]]:
        """Counts by split: see `data.select.write_sample.sample_units`."""
        return {split: writer.finish() for split, writer in self._writers.items()}
