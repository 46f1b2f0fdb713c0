"""The documents that one task reads, of a source or another step's output, and those it writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from data.read import columnar
from data.read.byte_ranges import file_state
from data.read.unit import Fields, Unit
from data.read.work_units import INVALID, NULL, read_units
from data.select.split_writer import COLUMNS, Splits
from pipeline.errors import InputError
from pipeline.store import storage

EXAMPLES, MOST_EXAMPLES = "dropped.json", 3
_EXAMPLE_CHARACTERS = 400
_MOST_REASONS = 1000
_TYPES = dict(zip(COLUMNS, (pa.string(), pa.string(), pa.int64()), strict=True))


class DocumentItem(NamedTuple):
    """What one task reads: the units of each split; those of a source are all "train".

    `columns` are the names of all columns: id, text, token_count and others.
    """

    parts: tuple[tuple[str, tuple[Unit, ...]], ...]
    columns: tuple[str, ...] = COLUMNS


def read_documents(
    item: DocumentItem, tally: Counter[str] | None = None
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """(split, rows) in the order of the files: batches of at most 1,024 rows of `item.columns`.

    `tally` is as in `data.read.work_units.read_unit`.
    """
    for split, units in item.parts:
        for batch in read_units(units, item.columns, tally):
            yield split, batch


def stored_unit(file: str, fields: Fields = Fields()) -> Unit:
    """All rows of a file that a step wrote, with its other columns.

    `fields` names the one that is the score, and says which rows to skip.
    """
    state = file_state(file)
    own = Fields(score=fields.score, skip_nulls=fields.skip_nulls, skip_invalid=fields.skip_invalid)
    whole, groups = columnar.row_groups(file, state, own)
    with columnar.open_parquet(file, state) as parquet:
        others = tuple(name for name in parquet.schema_arrow.names if name not in COLUMNS)
    return replace(
        whole,
        kind="documents",
        row_groups=tuple(range(len(groups))),
        rows=sum(group.rows for group in groups),
        text_bytes=sum(group.text_bytes for group in groups),
        columns=others,
    )


class DocumentWriter:
    """Writes `{split}.parquet` files of id, text, token_count and other columns to a directory.

    A context manager. After it `result` is that of the shard: for each split `documents`, `tokens`
    (by `token_count`), `bytes` and `digest`; `seen`, the documents written and dropped; `dropped`
    and `dropped_tokens` by reason; the types of the columns. The first documents that were
    dropped for each reason are in `dropped.json`.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._splits = Splits(directory, self._stack)
        self._columns: dict[str, str] = {}
        self._dropped, self._tokens = Counter[str](), Counter[str]()
        self._read: tuple[int, int] | None = None  # documents and tokens
        self._skipped = 0
        self._examples: dict[str, list[dict[str, str]]] = {}
        self.result: dict[str, Any] = {}

    def __enter__(self) -> DocumentWriter:
        return self

    def write(self, split: str, batch: pa.RecordBatch) -> None:
        """Append documents, all with the same columns; `InputError` for other ones."""
        columns = {field.name: str(field.type) for field in batch.schema}
        for name, kind in _TYPES.items():
            if columns.get(name) != str(kind):
                raise InputError(
                    f"documents: expected a column {name!r} of type {kind}, found "
                    f"{columns.get(name, 'none')}; see docs/documents.md"
                )
        if (self._columns or columns) != columns:
            raise InputError(
                f"documents: expected the columns {self._columns} of the first batch, found "
                f"{columns}; give all documents the same columns"
            )
        self._columns = columns
        if batch.num_rows:
            self._splits.write(split, batch)

    def read(self, batch: pa.RecordBatch) -> None:
        """Count documents as seen: if never called, those written and dropped are."""
        documents, tokens = self._read or (0, 0)
        self._read = documents + batch.num_rows, tokens + _tokens(batch)

    def drop(self, reason: str, batch: pa.RecordBatch) -> None:
        """Count documents that are not written, by the reason why."""
        if not batch.num_rows:
            return
        self._dropped[reason] += batch.num_rows
        self._tokens[reason] += _tokens(batch)
        if len(self._dropped) > _MOST_REASONS:
            raise InputError(
                f"documents: expected at most {_MOST_REASONS:,} reasons to drop documents, found "
                f"more, such as {reason!r:.80}; give the reason without what differs by document"
            )
        shown = self._examples.setdefault(reason, [])
        for row in batch.slice(0, MOST_EXAMPLES - len(shown)).select(["id", "text"]).to_pylist():
            shown.append({"id": row["id"], "text": row["text"][:_EXAMPLE_CHARACTERS]})

    def skip(self, tally: Counter[str]) -> None:
        """Count rows that are no documents, of which `read_documents` made the tally."""
        for reason in (NULL, INVALID):
            if count := tally[reason]:
                self._dropped[reason] += count
                self._skipped += count

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)
        if error is not None:
            return
        splits = self._splits.finish()
        if self._examples:
            content = json.dumps(self._examples, sort_keys=True).encode()
            storage.write_atomic(storage.join(self._directory, EXAMPLES), content)
        written = sum(counts["documents"] for counts in splits.values())
        tokens = sum(counts["tokens"] for counts in splits.values())
        if self._read is None:
            seen = written + self._dropped.total(), tokens + self._tokens.total()
        else:
            seen = self._read[0] + self._skipped, self._read[1]
        self.result = {
            "splits": splits,
            "seen": seen[0],
            "tokens_seen": seen[1],
            "dropped": dict(sorted(self._dropped.items())),
            "dropped_tokens": dict(sorted(self._tokens.items())),
            "columns": self._columns,
        }


def _tokens(batch: pa.RecordBatch) -> int:
    return pc.call_function("sum", [batch.column("token_count")]).as_py() or 0
