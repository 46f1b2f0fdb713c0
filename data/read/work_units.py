"""Divides sources of documents into units of work and reads units, checking every value.

A unit is a part of one file with about `target_bytes` of text: a range of Parquet row groups or of
JSON lines. A compressed, Arrow or text file is one unit. `data.read.formats` determines the format.
Parquet is read by row group with column projection, so a survey of ids and token counts does not
fetch the text. A huge source can be processed file by file: `list_files` reads no file, and
`file_units` and `row_groups` read one.

A unit is read as columns `id`, `text`, `token_count`, `score`, whatever their names in the file; a
document without an id gets one computed from its text. A null, text that is not UTF-8, a missing
column, a corrupt file and a file that changed since it was listed are an `InputError` with the
file's URL. The only rows skipped are those with a null, if requested, and they are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, pairwise
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from data.read import arrow_table, json_lines, parquet_file, python_docs, text_file
from data.read.arrow_strings import count_by_length, made_ids
from data.read.byte_ranges import FileState, file_state
from data.read.formats import compression, kind_of
from data.read.listing import find_files
from data.read.parquet_file import (
    check_values,
    most_tokens_of,
    open_parquet,
    unit_of,
)
from data.read.retry import redact
from data.read.small_files import grouped
from data.read.unit import BATCH_BYTES, BATCH_ROWS, UNKNOWN, Fields, Unit
from data.source import check_embedded, is_embedded
from pipeline.errors import InputError

EMBEDDED_ROW_GROUPS = 8
FOOTERS_AT_ONCE = 16
_PARTS = 8 * FOOTERS_AT_ONCE  # parts of the list of files, each handled by one thread
TARGET_BYTES = 64 << 20
_MOST_PACKED = 1000  # approximate upper bound of the compression ratio

_TYPES = {
    "id": pa.string(),
    "text": pa.string(),
    "token_count": pa.int64(),
    "score": pa.float64(),
}
_CUTS = {"lines": json_lines.cut, "text": text_file.cut, "arrow": arrow_table.cut}


class RowGroup(NamedTuple):
    """Sizes of a row group, from the footer of its file.

    Attributes:
        rows: number of documents.
        text_bytes: uncompressed bytes of the text column.
        compressed_bytes: bytes in the file of the columns id, text, token count and score.
    """

    rows: int
    text_bytes: int
    compressed_bytes: int


def list_files(source: str) -> list[tuple[str, int]]:
    """(URL, bytes) of every file of a source, sorted by name; opens no file.

    The embedded documentation is one file of 0 bytes.

    Raises:
        InputError: no file matches, or access is not permitted.
        StorageError: the store could not be listed.
    """
    if is_embedded(source):
        check_embedded(source)
        return [(source, 0)]
    return [(url, state.size) for url, state in _found(source)]


def list_units(
    source: str,
    fields: Fields = Fields(),
    *,
    target_bytes: int = TARGET_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> list[Unit]:
    """The units of a source, sorted by file name and by position in the file.

    Args:
        source: see `data.source`.
        fields: the source's names of the fields.
        target_bytes: a unit ends with the row group or line that reaches this many bytes of text.
        progress: called with (files done, files), after every file, or every few of many files.

    Raises:
        InputError: no file matches, a file cannot be read, a column is missing or of another type,
            or the source has no rows.
        StorageError: the store could not be listed or read.
    """
    if is_embedded(source):
        check_embedded(source)
        return _embedded_units(source)
    files = _found(source)
    units: list[Unit] = []
    step = max(1, len(files) // _PARTS)
    parts = [files[first : first + step] for first in range(0, len(files), step)]
    with ThreadPoolExecutor(max_workers=min(FOOTERS_AT_ONCE, len(files))) as pool:
        found = pool.map(
            lambda part: [_cut(file, state, fields, target_bytes) for file, state in part], parts
        )
        try:
            for done, cuts in enumerate(found, 1):
                units += chain.from_iterable(cuts)
                if progress is not None:
                    progress(min(done * step, len(files)), len(files))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if not units:
        raise InputError(
            f"source {redact(source)!r}: {len(files)} files match, with 0 rows in all; "
            "give a source with documents"
        )
    return units


def file_units(
    url: str, fields: Fields = Fields(), *, target_bytes: int = TARGET_BYTES
) -> list[Unit]:
    """The units of one file, as from `list_units`; none if it has no rows.

    Args:
        url: from `list_files`; the other arguments are as for `list_units`.

    Raises:
        InputError, StorageError: as `list_units`.
    """
    if is_embedded(url):
        return list_units(url)
    return _cut(url, file_state(url), fields, target_bytes)


def row_groups(url: str, fields: Fields = Fields()) -> list[RowGroup]:
    """The row groups of one Parquet file, from its footer; arguments and errors as `file_units`."""
    if is_embedded(url):
        return [RowGroup(u.rows, u.text_bytes, u.text_bytes) for u in list_units(url)]
    state = file_state(url)
    if (kind := kind_of(url, state)) != "parquet":
        raise InputError(
            f"{redact(url)}: expected a Parquet file, which has row groups, found {kind}; sample "
            'with unit="document"'
        )
    return _groups(url, state, fields)[1]


def fields_of(unit: Unit) -> Fields:
    """The unit's names of the fields."""
    return Fields(unit.text, unit.id, unit.score or "score", unit.skip_nulls)


def read_unit(
    unit: Unit, columns: Sequence[str], tally: Counter[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The unit's rows in source order, as record batches of at most 1,024 rows.

    Args:
        unit: from `list_units` or `file_units`.
        columns: any of `id` (string), `text` (string), `token_count` (int64) and `score` (float64,
            NaN is kept). If the file has no `token_count`, it is ceil(UTF-8 bytes / 4) of the text;
            if it has no id, the id is computed from the text.
        tally: counts all `rows`, and those skipped for a `null`. A row of a file with ids is not
            skipped for a null text alone, since the text may not have been read.

    Raises:
        InputError: a null, a text that is not UTF-8 or an impossible count (the message has file,
            row group and row), a corrupt or changed file, or `score` of a file without one.
        StorageError: the store does not answer.
    """
    if "score" in columns and unit.score is None:
        raise InputError(
            f"{redact(unit.file)}: has no column of numbers to read as a score; pass "
            "score=<name of the column>, or do not select by score"
        )
    packed = _MOST_PACKED if compression(unit.file) else 1
    most = most_tokens_of(unit.text_bytes * packed)
    current, row, rows = -1, 0, 0
    for group, batch in _batches(unit, columns):
        row = row if group == current else 0
        where = f"{redact(unit.file)}: " + _where(unit, group)
        current, row, rows = group, row + batch.num_rows, rows + batch.num_rows
        kept = _without_nulls(unit, batch) if unit.skip_nulls else batch
        if tally is not None:
            tally.update(rows=batch.num_rows, null=batch.num_rows - kept.num_rows)
        nulls = [*(["id"] if unit.id is None else []), *(["text"] if unit.skip_nulls else [])]
        checked = check_values(kept, where, row - batch.num_rows, most, nulls)
        yield _with_ids(unit, checked).select(list(columns))
    if unit.rows != UNKNOWN and rows != unit.rows:
        raise InputError(
            f"{redact(unit.file)}: row groups {unit.row_groups[0]} to {unit.row_groups[-1]}: "
            f"expected {unit.rows:,} rows, found {rows:,}; the file is corrupt: fetch it again"
        )


def read_units(
    units: Iterable[Unit], columns: Sequence[str], tally: Counter[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of units in order, as from `read_unit`.

    Neighbouring text files, which have one row each, share batches of up to 1,024 rows.
    """

    def joins(unit: Unit) -> bool:
        return unit.kind == "text" and "score" not in columns

    for together in grouped(units, joins, BATCH_ROWS, BATCH_BYTES):
        first = together[0]
        if len(together) == 1:
            yield from read_unit(first, columns, tally)
            continue
        batch = text_file.read(together, columns)
        if tally is not None:
            tally.update(rows=batch.num_rows)
        yield _with_ids(first, batch).select(list(columns))


def _where(unit: Unit, group: int) -> str:
    if unit.kind == "parquet":
        return f"row group {group}"
    return f"documents from byte {unit.begin:,} on" if unit.begin else "documents"


def _without_nulls(unit: Unit, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows without nulls, except that the text may be null in a file with ids."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        made = name == "id" and unit.id is None
        if not column.null_count or made or (name == "text" and unit.id is not None):
            continue
        batch = batch.filter(batch.column(name).is_valid())
    return batch


def _with_ids(unit: Unit, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch, with ids computed from the texts if the file has none."""
    if unit.id is not None or "id" not in batch.schema.names or is_embedded(unit.file):
        return batch
    place = batch.schema.get_field_index("id")
    return batch.set_column(place, "id", made_ids(batch.column("text")))


def _found(source: str) -> list[tuple[str, FileState]]:
    files = find_files(source)
    unknown = [url for url, state in files if state is None]
    with ThreadPoolExecutor(max_workers=FOOTERS_AT_ONCE) as pool:
        asked = dict(zip(unknown, pool.map(file_state, unknown), strict=True))
    return [(url, asked[url] if state is None else state) for url, state in files]


def _cut(file: str, state: FileState, fields: Fields, target_bytes: int) -> list[Unit]:
    kind = kind_of(file, state)
    if kind != "parquet":
        return _CUTS[kind](file, state, fields, target_bytes)
    whole, found = _groups(file, state, fields)
    units: list[Unit] = []
    groups: list[int] = []
    rows = size = 0
    for index, group in enumerate(found):
        groups.append(index)
        rows += group.rows
        size += group.text_bytes
        if size >= target_bytes or index == len(found) - 1:
            if rows:
                units.append(replace(whole, row_groups=tuple(groups), rows=rows, text_bytes=size))
            groups, rows, size = [], 0, 0
    return units


def _groups(file: str, state: FileState, fields: Fields) -> tuple[Unit, list[RowGroup]]:
    """The file as one unit, and its row groups."""
    with open_parquet(file, state) as parquet:
        metadata, schema = parquet.metadata, parquet.schema_arrow
    whole = unit_of(file, state, schema, fields)
    wanted = {name for name in (whole.id, whole.text, whole.score) if name is not None}
    wanted |= {"token_count"} if whole.counted else set()
    found = parquet_file.row_groups(file, state.size, metadata, fields.text, wanted)
    return whole, [RowGroup(*group) for group in found]


def _batches(unit: Unit, columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(row group, unchecked record batch) of a unit: `columns`, and the text if ids need it."""
    if is_embedded(unit.file):
        check_embedded(unit.file)
        table = python_docs.documents().select(list(columns))
        for group in unit.row_groups:
            rows = _embedded_rows(table.num_rows)[group]
            for batch in table.slice(rows.start, len(rows)).to_batches(BATCH_ROWS):
                yield group, batch
    elif unit.kind == "lines":
        for batch in json_lines.read(unit, columns):
            yield 0, batch
    elif unit.kind == "text":
        yield 0, text_file.read((unit,), columns)
    else:
        yield from _columnar(unit, columns)


def _columnar(unit: Unit, columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """`_batches` for a Parquet or Arrow file."""
    names = {"id": unit.id, "text": unit.text, "token_count": "token_count", "score": unit.score}
    length = "token_count" in columns and not unit.counted
    making = "id" in columns and unit.id is None
    kept = [*columns, *(["text"] if making and "text" not in columns else [])]
    wanted = {name for name in kept if name != "token_count" or unit.counted}
    wanted = {name for name in wanted | ({"text"} if length else set()) if names[name] is not None}
    in_file = sorted({str(names[name]) for name in wanted})
    for group, batch in _raw(unit, in_file):
        # A score may be an integer that float64 rounds; that does not matter for selection.
        found = {
            name: batch.column(names[name]).cast(_TYPES[name], safe=name != "score")
            for name in wanted
        }
        if "score" in found and unit.skip_nulls:
            found["score"] = pc.fill_null(found["score"], float("nan"))
        if length:
            found["token_count"] = count_by_length(found["text"])
        if making:
            found["id"] = pa.nulls(batch.num_rows, pa.string())
        yield group, pa.RecordBatch.from_pydict({name: found[name] for name in kept})


def _raw(unit: Unit, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    if unit.kind == "arrow":
        for batch in arrow_table.read(unit, columns):
            yield 0, batch
        return
    rows = max(1, min(BATCH_ROWS, BATCH_BYTES * unit.rows // max(unit.text_bytes, 1)))
    state = FileState(unit.size, unit.version) if unit.size else None
    with open_parquet(unit.file, state) as parquet:
        for group in unit.row_groups:
            # One row group at a time: reading several would keep all of them in memory.
            for batch in parquet.iter_batches(rows, row_groups=[group], columns=columns):
                yield group, batch


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
