"""Parquet sources: cutting them into units of work, and reading a unit with its schema checked.

The unit of fan-out is a range of row groups of one file, holding about `target_bytes` of text by
the file's footer; the embedded documentation is cut the same way. Reading is by row group with
column projection, so a survey that wants ids and token counts never fetches the text. A huge
source can be taken file by file: `list_files` reads no footer, `file_units` and `row_groups` one.

A unit reads as columns `id`, `text`, `token_count`, `score` whatever the file calls them. A row
without an id or text, text that is not UTF-8, a missing column, a damaged file and a file that
changed since it was listed are an `InputError` with its address; no row is ever skipped here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.read import parquet_file, python_docs
from data.read.byte_ranges import FileState, file_state
from data.read.listing import find_files
from data.read.parquet_file import Columns, check_schema, check_values, open_parquet
from data.read.retry import redact
from data.source import check_embedded, is_embedded
from pipeline.errors import InputError

BYTES_PER_TOKEN = 4  # of English text, where a file has no `token_count`
EMBEDDED_ROW_GROUPS = 8
FOOTERS_AT_ONCE = 16

_BATCH_ROWS = 1024
_TYPES = {
    "id": pa.string(),
    "text": pa.string(),
    "token_count": pa.int64(),
    "score": pa.float64(),
}


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A row-group range of one source file, the piece of work that one task does.

    Attributes:
        file: URL of the Parquet file, or of the embedded documentation.
        row_groups: indices of the row groups, ascending and adjacent.
        rows: documents in them.
        text_bytes: uncompressed bytes of the text column by the footer (a few bytes per document
            more than the text itself).
        id: the file's name for the id column.
        text: the file's name for the text column.
        counted: whether the file has a `token_count` column.
        score: the file's name for the score, a column of numbers; None when it has none.
        size: bytes of the file when it was cut into units; 0 where that is not known.
        version: what its store called its content then, see `data.read.byte_ranges.FileState`.
    """

    file: str
    row_groups: tuple[int, ...]
    rows: int
    text_bytes: int
    id: str = "id"
    text: str = "text"
    counted: bool = True
    score: str | None = None
    size: int = 0
    version: str = ""


class RowGroup(NamedTuple):
    """A row group by the footer of its file.

    Attributes:
        rows: documents.
        text_bytes: uncompressed bytes of the text column.
        compressed_bytes: bytes of the file that reading id, text, token count and score fetches.
    """

    rows: int
    text_bytes: int
    compressed_bytes: int


def list_files(source: str) -> list[tuple[str, int]]:
    """(URL, bytes) of every file of a source, in order of name; no file is opened.

    The embedded documentation is one file of 0 bytes.

    Raises:
        InputError: no file matches, or it is not permitted.
        StorageError: the store could not be listed.
    """
    if is_embedded(source):
        check_embedded(source)
        return [(source, 0)]
    return [(url, state.size) for url, state in _found(source)]


def list_units(
    source: str,
    *,
    text: str = "text",
    id: str = "id",
    score: str = "score",
    target_bytes: int = 64 << 20,
    progress: Callable[[int, int], None] | None = None,
) -> list[Unit]:
    """The units of a source, in the order of file names and row groups.

    Args:
        source: see `data.source`.
        text: name of the text column, a string type.
        id: name of the column that identifies a document, a string or integer type.
        score: name of a column of numbers that may be read as `score`, where a file has it.
        target_bytes: a unit ends with the row group that reaches this many bytes of text.
        progress: called with (footers read, files) after each file.

    Raises:
        InputError: no file matches, a file is not readable Parquet, a column is missing or of
            another type, or there are no rows at all.
        StorageError: the store could not be listed or read.
    """
    if is_embedded(source):
        check_embedded(source)
        return _embedded_units(source)
    files = _found(source)
    units: list[Unit] = []
    with ThreadPoolExecutor(max_workers=min(FOOTERS_AT_ONCE, len(files))) as pool:
        found = pool.map(lambda f: _cut(f[0], f[1], text, id, score, target_bytes), files)
        try:
            for done, cut in enumerate(found, 1):
                units += cut
                if progress is not None:
                    progress(done, len(files))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if not units:
        raise InputError(
            f"source {redact(source)!r}: {len(files)} Parquet files match, with 0 rows in all; "
            "give a source with documents"
        )
    return units


def file_units(
    url: str,
    *,
    text: str = "text",
    id: str = "id",
    score: str = "score",
    target_bytes: int = 64 << 20,
) -> list[Unit]:
    """The units of one file, as `list_units` would cut it; none when it has no rows.

    Args:
        url: from `list_files`; the rest as for `list_units`.

    Raises:
        InputError, StorageError: as `list_units`.
    """
    if is_embedded(url):
        return list_units(url)
    return _cut(url, file_state(url), text, id, score, target_bytes)


def row_groups(
    url: str, *, text: str = "text", id: str = "id", score: str = "score"
) -> list[RowGroup]:
    """The row groups of one file, from its footer alone; arguments and errors as `file_units`."""
    if is_embedded(url):
        return [RowGroup(u.rows, u.text_bytes, u.text_bytes) for u in list_units(url)]
    return _groups(url, file_state(url), text, id, score)[1]


def read_unit(unit: Unit, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The unit's rows in source order, as record batches of at most 1,024 rows.

    Args:
        unit: from `list_units` or `file_units`.
        columns: any of `id` (string), `text` (string), `token_count` (int64) and `score` (float64,
            NaN as it is). Where the file has no `token_count` the text is read and
            ceil(UTF-8 bytes / 4) stands in.

    Raises:
        InputError: a null, a text that is not UTF-8 or a negative count (file, row group and row
            are named), damage, a file that changed, or a score asked of a file that has none.
        StorageError: the store does not answer.
    """
    if "score" in columns and unit.score is None:
        raise InputError(
            f"{redact(unit.file)}: has no column of numbers to read as a score; pass "
            "score=<name of the column>, or do not select by score"
        )
    # A token is at least a byte, and one that begins or ends each document may be added.
    most_tokens = 2 * unit.text_bytes + 2
    current, row, rows = -1, 0, 0
    for group, batch in _batches(unit, columns):
        row = row if group == current else 0
        yield check_values(batch, f"{redact(unit.file)}: row group {group}", row, most_tokens)
        current, row, rows = group, row + batch.num_rows, rows + batch.num_rows
    if rows != unit.rows:
        raise InputError(
            f"{redact(unit.file)}: row groups {unit.row_groups[0]} to {unit.row_groups[-1]}: "
            f"expected {unit.rows:,} rows, found {rows:,}; the file is damaged: fetch it again"
        )


def _found(source: str) -> list[tuple[str, FileState]]:
    files = find_files(source)
    with ThreadPoolExecutor(max_workers=min(FOOTERS_AT_ONCE, len(files))) as pool:
        states = pool.map(lambda file: file[1] or file_state(file[0]), files)
        return [(url, state) for (url, _), state in zip(files, states, strict=True)]


def _cut(
    file: str, state: FileState, text: str, id: str, score: str, target_bytes: int
) -> list[Unit]:
    names, found = _groups(file, state, text, id, score)
    units: list[Unit] = []
    groups: list[int] = []
    rows = size = 0
    for index, group in enumerate(found):
        groups.append(index)
        rows += group.rows
        size += group.text_bytes
        if size >= target_bytes or index == len(found) - 1:
            if rows:
                units.append(
                    Unit(
                        file=file,
                        row_groups=tuple(groups),
                        rows=rows,
                        text_bytes=size,
                        id=id,
                        text=text,
                        counted=names.token_count is not None,
                        score=names.score,
                        size=state.size,
                        version=state.version,
                    )
                )
            groups, rows, size = [], 0, 0
    return units


def _groups(
    file: str, state: FileState, text: str, id: str, score: str
) -> tuple[Columns, list[RowGroup]]:
    with open_parquet(file, state) as parquet:
        metadata, schema = parquet.metadata, parquet.schema_arrow
    names = check_schema(file, schema, text, id, score)
    wanted = {name for name in (id, text, names.token_count, names.score) if name is not None}
    found = parquet_file.row_groups(file, state.size, metadata, text, wanted)
    return names, [RowGroup(*group) for group in found]


def _batches(unit: Unit, columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(row group, record batch with the columns asked for) of a unit, unchecked."""
    if is_embedded(unit.file):
        check_embedded(unit.file)
        table = python_docs.documents().select(list(columns))
        for group in unit.row_groups:
            rows = _embedded_rows(table.num_rows)[group]
            for batch in table.slice(rows.start, len(rows)).to_batches(_BATCH_ROWS):
                yield group, batch
        return
    names = {"id": unit.id, "text": unit.text, "token_count": "token_count", "score": unit.score}
    wanted = {name for name in columns if name != "token_count" or unit.counted}
    count_by_length = "token_count" in columns and not unit.counted
    wanted |= {"text"} if count_by_length else set()
    in_file = sorted({str(names[name]) for name in wanted})
    state = FileState(unit.size, unit.version) if unit.size else None
    with open_parquet(unit.file, state) as parquet:
        for group in unit.row_groups:
            # One row group at a time: a read of many would hold all of them in memory.
            for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=in_file):
                # A score may be an integer that no double holds; its last digit selects nothing.
                found = {
                    name: batch.column(names[name]).cast(_TYPES[name], safe=name != "score")
                    for name in wanted
                }
                if count_by_length:
                    found["token_count"] = _count_by_length(found["text"])
                yield group, pa.RecordBatch.from_pydict({name: found[name] for name in columns})


def _count_by_length(text: pa.Array) -> pa.Array:
    filled = pc.call_function("binary_length", [pc.fill_null(text, "")])
    counts = -(-filled.to_numpy(zero_copy_only=False).astype(np.int64) // BYTES_PER_TOKEN)
    return pa.array(counts, pa.int64())


def _embedded_rows(rows: int) -> list[range]:
    """The virtual row groups of the embedded table, so that it fans out like any source."""
    edges = [rows * index // EMBEDDED_ROW_GROUPS for index in range(EMBEDDED_ROW_GROUPS + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _embedded_units(source: str) -> list[Unit]:
    table = python_docs.documents()
    sizes = pc.call_function("binary_length", [table["text"]]).to_numpy()
    return [
        Unit(
            file=source,
            row_groups=(index,),
            rows=len(rows),
            text_bytes=int(sizes[rows.start : rows.stop].sum()),
        )
        for index, rows in enumerate(_embedded_rows(table.num_rows))
    ]
