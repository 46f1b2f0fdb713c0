"""Divides sources of documents into units of work and reads units, checking every value.

A unit is a part of one file with about `target_bytes` of text: a range of Parquet row groups or of
JSON lines, or a whole compressed, Arrow or text file. A null, text that is not UTF-8, an impossible
count, a line that is no document, a missing column, and a corrupt or changed file are an
`InputError` with the file's URL. Rows with a null, and rows that are no document, are skipped if
requested, and counted; a file is never read in part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pyarrow as pa

from data.read import columnar, parquet_table, text
from data.read.byte_ranges import FileState, file_state
from data.read.columnar import names_of
from data.read.formats import compression, kind_of
from data.read.listing import find_files
from data.read.parquet_file import RowGroup
from data.read.retry import redact
from data.read.unit import BATCH_BYTES, BATCH_ROWS, SCORE, UNKNOWN, Fields, Rows, Unit, grouped
from data.read.values import impossible_counts, made_ids, most_tokens_of
from pipeline.errors import InputError

NULL, INVALID = "null", "invalid"  # why a row is skipped
FOOTERS_AT_ONCE = 16
_PARTS = 8 * FOOTERS_AT_ONCE  # parts of the list of files, each handled by one thread
TARGET_BYTES = 64 << 20
_MOST_PACKED = 1000  # approximate upper bound of the compression ratio


# How to cut a file into units, and how to read one unit (of text, several).
_CUT: dict[str, Callable[[str, FileState, Fields, int], list[Unit]]] = {
    "parquet": columnar.cut_parquet,
    "arrow": columnar.cut_arrow,
    "lines": text.cut_lines,
    "text": text.cut_text,
}
_READ: dict[str, Callable[[Sequence[Unit], Sequence[str]], Iterator[Rows]]] = {
    "parquet": columnar.read,
    "arrow": columnar.read,
    "lines": text.read_lines,
    "text": text.read_text,
    "documents": parquet_table.read_rows,
}


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
    return columnar.row_groups(url, state, fields)[1]


def fields_of(unit: Unit) -> Fields:
    return Fields(
        unit.text, unit.id, unit.score or "score", unit.skip_nulls, unit.skip_invalid, unit.columns
    )


def raw_rows(unit: Unit, columns: Sequence[str]) -> Iterator[Rows]:
    """All rows of a unit in source order, those that `read_unit` skips included."""
    return _READ[unit.kind]((unit,), columns)


def read_unit(
    unit: Unit, columns: Sequence[str], tally: Counter[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The unit's rows in source order, as record batches of at most 1,024 rows and about 16 MB.

    Args:
        columns: any of `id` (string), `text` (string), `token_count` (int64), `SCORE` (float64,
            NaN is kept) and the unit's other columns. If the file has no `token_count`, it is
            ceil(UTF-8 bytes / 4) of the text; if it has no id, the id is computed from the text.
        tally: counts all `rows`, and those skipped as `NULL` or `INVALID`.
    """
    return _read((unit,), columns, tally)


def read_units(
    units: Iterable[Unit], columns: Sequence[str], tally: Counter[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of units in order, as from `read_unit`.

    Neighbouring text files, which have one row each, share batches.
    """

    def joins(unit: Unit) -> bool:
        return unit.kind == "text" and SCORE not in columns

    for together in grouped(units, joins, BATCH_ROWS, BATCH_BYTES):
        yield from _read(together, columns, tally)


def _read(
    units: Sequence[Unit], columns: Sequence[str], tally: Counter[str] | None
) -> Iterator[pa.RecordBatch]:
    unit, found = units[0], 0
    if SCORE in columns and unit.score is None:
        raise InputError(
            f"{redact(unit.file)}: has no column of numbers to read as a score; pass "
            "score=<name of the column>, or do not select by score"
        )
    for rows in _READ[unit.kind](units, columns):
        found += rows.batch.num_rows
        yield _documents(unit, rows, columns, tally)
    if unit.kind in ("parquet", "documents") and unit.rows not in (UNKNOWN, found):
        raise InputError(
            f"{redact(unit.file)}: row groups {unit.row_groups[0]} to {unit.row_groups[-1]}: "
            f"expected {unit.rows:,} rows, found {found:,}; the file is corrupt: fetch it again"
        )


def _documents(
    unit: Unit, rows: Rows, columns: Sequence[str], tally: Counter[str] | None
) -> pa.RecordBatch:
    """The columns of the rows that are documents; without leave to skip the others, it raises."""
    batch = rows.batch
    # The buffers of an Arrow file may be compressed, whatever its name.
    packed = _MOST_PACKED if unit.kind == "arrow" or compression(unit.file) else 1
    most = most_tokens_of(unit.text_bytes * packed)
    invalid = {**impossible_counts(batch, most), **rows.invalid}
    null = np.zeros(batch.num_rows, bool)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count and name not in unit.columns:
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
        found = " and ".join(repr(names_of(unit)[name]) for name in names)
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


def _found(source: str) -> list[tuple[str, FileState]]:
    files = find_files(source)
    unknown = [url for url, state in files if state is None]
    with ThreadPoolExecutor(max_workers=FOOTERS_AT_ONCE) as pool:
        asked = dict(zip(unknown, pool.map(file_state, unknown), strict=True))
    return [(url, asked[url] if state is None else state) for url, state in files]


def _cut(file: str, state: FileState, fields: Fields, target_bytes: int) -> list[Unit]:
    return _CUT[kind_of(file, state)](file, state, fields, target_bytes)
