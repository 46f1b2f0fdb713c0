"""Divides sources of documents into units of work and reads units, checking every value.

A unit is a part of one file with about `target_bytes` of text: a range of Parquet row groups or of
JSON lines. A compressed, Arrow or text file is one unit. `data.read.formats` determines the format.
Parquet is read by row group with column projection, so a survey of ids and token counts does not
fetch the text. A huge source can be processed file by file: `list_files` reads no file, and
`file_units` and `row_groups` read one.

A unit is read as columns `id`, `text`, `token_count`, `score`, whatever their names in the file; a
document without an id gets one computed from its text. A null, text that is not UTF-8, an
impossible count, a line that is no document, a missing column, a corrupt file and a file that
changed since it was listed are an `InputError` with the file's URL. Rows with a null, and rows that
are no document, are skipped if requested, and counted; a file is never read in part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data.read import arrow_table, json_lines, parquet_file, text_file
from data.read.arrow_strings import count_by_length, made_ids
from data.read.byte_ranges import FileState, file_state
from data.read.formats import compression, kind_of
from data.read.listing import find_files
from data.read.parquet_file import open_parquet, unit_of
from data.read.retry import redact
from data.read.small_files import grouped
from data.read.unit import BATCH_BYTES, BATCH_ROWS, UNKNOWN, Fields, Rows, Unit
from data.read.values import (
    converted,
    impossible_counts,
    joined,
    most_tokens_of,
    pieces,
)
from pipeline.errors import InputError

NULL, INVALID = "null", "invalid"  # why a row is skipped
FOOTERS_AT_ONCE = 16
_PARTS = 8 * FOOTERS_AT_ONCE  # parts of the list of files, each handled by one thread
TARGET_BYTES = 64 << 20
_STEP_ROWS = 32
_MOST_PACKED = 1000  # approximate upper bound of the compression ratio

_CUTS = {"lines": json_lines.cut, "text": text_file.cut, "arrow": arrow_table.cut}


class RowGroup(NamedTuple):
    """Sizes of a row group, from the footer of its file.

    Attributes:
        text_bytes: uncompressed bytes of the text column.
        compressed_bytes: bytes in the file of the columns id, text, token count and score.
    """

    rows: int
    text_bytes: int
    compressed_bytes: int


def list_files(source: str) -> list[tuple[str, int]]:
    """(URL, bytes) of every file of a source, sorted by name; opens no file."""
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
        target_bytes: a unit ends with the row group or line that reaches this many bytes of text.
        progress: called with (files done, files), after every file, or every few of many files.
    """
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
    """The units of one file, as from `list_units`; none if it has no rows."""
    return _cut(url, file_state(url), fields, target_bytes)


def row_groups(url: str, fields: Fields = Fields()) -> list[RowGroup]:
    """The row groups of one Parquet file, from its footer; arguments and errors as `file_units`."""
    state = file_state(url)
    if (kind := kind_of(url, state)) != "parquet":
        raise InputError(
            f"{redact(url)}: expected a Parquet file, which has row groups, found {kind}; sample "
            'with unit="document"'
        )
    return _groups(url, state, fields)[1]


def fields_of(unit: Unit) -> Fields:
    return Fields(unit.text, unit.id, unit.score or "score", unit.skip_nulls, unit.skip_invalid)


def read_unit(
    unit: Unit, columns: Sequence[str], tally: Counter[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The unit's rows in source order, as record batches of at most 1,024 rows and about 16 MB.

    Args:
        columns: any of `id` (string), `text` (string), `token_count` (int64) and `score` (float64,
            NaN is kept). If the file has no `token_count`, it is ceil(UTF-8 bytes / 4) of the text;
            if it has no id, the id is computed from the text.
        tally: counts all `rows`, and those skipped as `NULL` or `INVALID`.

    Raises:
        InputError: a null, an invalid value (the message has file, row and column), a corrupt or
            changed file, or `score` of a file without one.
    """
    if "score" in columns and unit.score is None:
        raise InputError(
            f"{redact(unit.file)}: has no column of numbers to read as a score; pass "
            "score=<name of the column>, or do not select by score"
        )
    found = 0
    for rows in _batches(unit, columns):
        found += rows.batch.num_rows
        yield _documents(unit, rows, columns, tally)
    if unit.rows not in (UNKNOWN, found):
        raise InputError(
            f"{redact(unit.file)}: row groups {unit.row_groups[0]} to {unit.row_groups[-1]}: "
            f"expected {unit.rows:,} rows, found {found:,}; the file is corrupt: fetch it again"
        )


def read_units(
    units: Iterable[Unit], columns: Sequence[str], tally: Counter[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of units in order, as from `read_unit`.

    Neighbouring text files, which have one row each, share batches.
    """

    def joins(unit: Unit) -> bool:
        return unit.kind == "text" and "score" not in columns

    for together in grouped(units, joins, BATCH_ROWS, BATCH_BYTES):
        if len(together) == 1:
            yield from read_unit(together[0], columns, tally)
            continue
        for rows in text_file.read(together, columns):
            yield _documents(together[0], rows, columns, tally)


def _documents(
    unit: Unit, rows: Rows, columns: Sequence[str], tally: Counter[str] | None
) -> pa.RecordBatch:
    """The columns of the rows that are documents; without leave to skip the others, it raises."""
    batch = rows.batch
    packed = _MOST_PACKED if compression(unit.file) else 1
    most = most_tokens_of(unit.text_bytes * packed)
    invalid = {**impossible_counts(batch, most), **rows.invalid}
    null = np.zeros(batch.num_rows, bool)
    for column in batch.columns:
        if column.null_count:
            null |= column.is_null().to_numpy(zero_copy_only=False)
    null[list(invalid)] = False
    if invalid and not unit.skip_invalid:
        row = min(invalid)
        raise InputError(
            f"{rows.place(row)}: {invalid[row]}, or leave such rows out with skip_invalid=True"
        )
    if null.any() and not unit.skip_nulls:
        row = int(np.argmax(null))
        names = [n for n in batch.schema.names if not batch.column(n)[row].is_valid]
        found = " and ".join(repr(_names(unit)[name]) for name in names)
        raise InputError(
            f"{rows.place(row)}: expected a value in {found}, found null; drop such rows from the "
            "source, or leave them out with skip_nulls=True"
        )
    if tally is not None:
        tally.update({"rows": batch.num_rows, NULL: int(null.sum()), INVALID: len(invalid)})
    if invalid or null.any():
        null[list(invalid)] = True
        batch = batch.filter(pa.array(~null))
    if "id" in columns and "id" not in batch.schema.names:
        batch = batch.append_column("id", made_ids(batch.column("text")))
    return batch.select(list(columns))


def _names(unit: Unit) -> dict[str, str | None]:
    count = "token_count" if unit.counted else None
    return {"id": unit.id, "text": unit.text, "token_count": count, "score": unit.score}


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
    with open_parquet(file, state) as parquet:  # its names may not be UTF-8
        whole = unit_of(file, state, parquet.schema_arrow, fields)
        parquet_file.check_footer(file, state, parquet.metadata)
        wanted = {name for name in _names(whole).values() if name is not None}
        found = parquet_file.row_groups(file, parquet.metadata, fields.text, wanted)
    return whole, [RowGroup(*group) for group in found]


def _batches(unit: Unit, columns: Sequence[str]) -> Iterator[Rows]:
    """The rows of a unit: `columns`, and the text if ids need it."""
    if unit.kind == "lines":
        yield from json_lines.read(unit, columns)
    elif unit.kind == "text":
        yield from text_file.read((unit,), columns)
    else:
        yield from _columnar(unit, columns)


def _columnar(unit: Unit, columns: Sequence[str]) -> Iterator[Rows]:
    """`_batches` for a Parquet or Arrow file."""
    names = _names(unit)
    length = "token_count" in columns and not unit.counted
    wanted = {name for name in columns if names[name] is not None}
    if length or ("id" in columns and unit.id is None):
        wanted.add("text")

    def typed(raw: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, str]]:
        found: dict[str, pa.Array] = {}
        invalid: dict[int, str] = {}
        for name in sorted(wanted):
            known = str(names[name])
            found[name], wrong = converted(name, known, raw.column(known))
            invalid |= wrong
        if length:
            found["token_count"] = count_by_length(found["text"])
        return pa.RecordBatch.from_pydict(found), invalid

    with _raw(unit, sorted({str(names[name]) for name in wanted})) as raws:
        for group, batches in raws:
            first = 0
            for raw in batches:
                for piece in pieces(raw):
                    batch, invalid = typed(piece)
                    yield Rows(batch, invalid, partial(_place, unit, group, first))
                    first += batch.num_rows


def _place(unit: Unit, group: int, first: int, row: int) -> str:
    inside = f"row group {group}, " if unit.kind == "parquet" else ""
    return f"{redact(unit.file)}: {inside}row {first + row} (counted from 0)"


@contextmanager
def _raw(
    unit: Unit, columns: list[str]
) -> Iterator[Iterator[tuple[int, Iterator[pa.RecordBatch]]]]:
    """(row group, its batches as they are in the file) of a unit; what fails within is the file."""
    if unit.kind == "arrow":
        with arrow_table.open_batches(unit, columns) as batches:
            yield iter([(0, batches)])
        return
    state = FileState(unit.size, unit.version) if unit.size else None
    with open_parquet(unit.file, state) as parquet:
        kind = parquet.schema_arrow.field(unit.text).type
        packed = unit.text not in columns or pa.types.is_dictionary(kind)
        # Few rows at once: a dictionary can make gigabytes of a text that is in the file once.
        rows = BATCH_ROWS if packed else _STEP_ROWS
        rows = max(1, min(rows, BATCH_BYTES * unit.rows // max(unit.text_bytes, 1)))

        def read(group: int) -> Iterator[pa.RecordBatch]:
            found = parquet.iter_batches(rows, row_groups=[group], columns=columns)
            return found if packed else joined(found)

        # One row group at a time: reading several would keep all of them in memory.
        yield ((group, read(group)) for group in unit.row_groups)
