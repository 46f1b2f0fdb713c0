"""Parquet sources: cutting them into units of work, and reading a unit with its schema checked.

The unit of fan-out is a range of row groups of one file, holding about `target_bytes` of text by
the file's footer; the embedded documentation is cut the same way. Reading is by row group with
column projection, so a survey that wants ids and token counts never fetches the text.

A unit reads as columns `id`, `text`, `token_count` whatever the file calls them. A row without an
id or text, a missing column or a damaged file is an `InputError` with its address; no row is ever
skipped here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from data import embedded
from data.source import is_embedded
from data.table import is_damage, one_line
from pipeline import storage
from pipeline.errors import InputError, StorageError

BYTES_PER_TOKEN = 4  # of English text, where a file has no `token_count`
EMBEDDED_ROW_GROUPS = 8

_BATCH_ROWS = 1024
_TYPES = {"id": pa.string(), "text": pa.string(), "token_count": pa.int64()}


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
    """

    file: str
    row_groups: tuple[int, ...]
    rows: int
    text_bytes: int
    id: str = "id"
    text: str = "text"
    counted: bool = True


def list_units(
    source: str, *, text: str = "text", id: str = "id", target_bytes: int = 64 << 20
) -> list[Unit]:
    """The units of a source, in the order of file names and row groups.

    Args:
        source: see `data.source`.
        text: name of the text column, a string type.
        id: name of the column that identifies a document, a string or integer type.
        target_bytes: a unit ends with the row group that reaches this many bytes of text.

    Raises:
        InputError: no file matches, a file is not readable Parquet, a column is missing or of
            another type, or there are no rows at all.
        StorageError: the store could not be listed.
    """
    if is_embedded(source):
        embedded.check_version(source)
        return _embedded_units(source)
    files = _matching_files(source)
    with ThreadPoolExecutor(max_workers=min(16, len(files))) as pool:
        found = pool.map(lambda file: _file_units(file, text, id, target_bytes), files)
        units = [unit for units in found for unit in units]
    if not units:
        raise InputError(
            f"source {source!r}: {len(files)} Parquet files match, with 0 rows in all; "
            "give a source with documents"
        )
    return units


def read_unit(unit: Unit, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The unit's rows in source order, as record batches of at most 1,024 rows.

    Args:
        unit: from `list_units`.
        columns: any of `id` (string), `text` (string) and `token_count` (int64). Where the file
            has no `token_count` the text is read and ceil(UTF-8 bytes / 4) stands in.

    Raises:
        InputError: a null or a negative count (file, row group and row are named), or damage.
    """
    current, row = -1, 0
    for group, batch in _batches(unit, columns):
        row = row if group == current else 0
        yield _checked(batch, f"{unit.file}: row group {group}", row)
        current, row = group, row + batch.num_rows


def _matching_files(source: str) -> list[str]:
    fs, path = storage.filesystem(source)
    try:
        found = sorted(fs.glob(path))
    except FileNotFoundError:
        found = []
    except Exception as error:
        raise StorageError(
            f"source {source!r}: the store could not be listed: {one_line(error)}; "
            "check the address, the network and your permission"
        ) from error
    if not found:
        raise InputError(f"source {source!r}: no file matches; check the address and the pattern")
    return found if isinstance(fs, LocalFileSystem) else [fs.unstrip_protocol(f) for f in found]


def _file_units(file: str, text: str, id: str, target_bytes: int) -> list[Unit]:
    with _open(file) as parquet:
        metadata, schema = parquet.metadata, parquet.schema_arrow
    counted = _check_schema(file, schema, text, id)
    leaf = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == text)
    units: list[Unit] = []
    groups: list[int] = []
    rows = size = 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        groups.append(index)
        rows += group.num_rows
        size += group.column(leaf).total_uncompressed_size
        if size >= target_bytes or index == metadata.num_row_groups - 1:
            if rows:
                units.append(
                    Unit(
                        file=file,
                        row_groups=tuple(groups),
                        rows=rows,
                        text_bytes=size,
                        id=id,
                        text=text,
                        counted=counted,
                    )
                )
            groups, rows, size = [], 0, 0
    return units


def _check_schema(file: str, schema: pa.Schema, text: str, id: str) -> bool:
    """Refuse a file without usable text and id columns; whether it counts tokens."""
    for argument, name in (("text", text), ("id", id)):
        if schema.names.count(name) != 1:
            raise InputError(
                f"{file}: expected one column {name!r} for the {argument}, found columns "
                f"{', '.join(schema.names)}; pass {argument}=<name of the column>"
            )
        kind = schema.field(name).type
        is_string = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if not (is_string or (argument == "id" and pa.types.is_integer(kind))):
            raise InputError(
                f"{file}: column {name!r} has type {kind}, expected a string; "
                f"pass {argument}=<name of a string column>"
            )
    if "token_count" not in schema.names:
        return False
    kind = schema.field("token_count").type
    if not pa.types.is_integer(kind):
        raise InputError(
            f"{file}: column 'token_count' has type {kind}, expected an integer; "
            "write it as int64, or leave the column out"
        )
    return True


@contextmanager
def _open(file: str) -> Iterator[pq.ParquetFile]:
    """The Parquet file at a URL; what is wrong with its bytes becomes an `InputError`."""
    try:
        with (
            _open_ranges(file) as handle,
            pq.ParquetFile(handle, pre_buffer=True, page_checksum_verification=True) as parquet,
        ):
            yield parquet
    except FileNotFoundError as error:
        raise InputError(
            f"{file}: expected a Parquet file, found none; check the source"
        ) from error
    except (pa.ArrowException, OSError) as error:
        if not is_damage(error):
            raise
        raise InputError(
            f"{file}: expected a whole Parquet file, found {one_line(error)}; "
            "fetch the file again or leave it out of the source"
        ) from error


def _open_ranges(file: str) -> IO[bytes]:
    """The file, fetching exactly what is read.

    An object store's file reads 5 MiB ahead by default, which would fetch the text around every
    chunk of ids; Arrow joins neighbouring reads by itself.
    """
    fs, path = storage.filesystem(file)
    if isinstance(fs, LocalFileSystem):
        return storage.open_read(file)
    return fs.open(path, "rb", cache_type="none")


def _batches(unit: Unit, columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(row group, record batch with the columns asked for) of a unit, unchecked."""
    if is_embedded(unit.file):
        embedded.check_version(unit.file)
        table = embedded.documents().select(list(columns))
        for group in unit.row_groups:
            rows = _embedded_rows(table.num_rows)[group]
            for batch in table.slice(rows.start, len(rows)).to_batches(_BATCH_ROWS):
                yield group, batch
        return
    names = {"id": unit.id, "text": unit.text, "token_count": "token_count"}
    wanted = {name for name in columns if name != "token_count" or unit.counted}
    count_by_length = "token_count" in columns and not unit.counted
    wanted |= {"text"} if count_by_length else set()
    in_file = sorted({names[name] for name in wanted})
    with _open(unit.file) as parquet:
        for group in unit.row_groups:
            # One row group at a time: a read of many would hold all of them in memory.
            for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=in_file):
                found = {name: batch.column(names[name]).cast(_TYPES[name]) for name in wanted}
                if count_by_length:
                    found["token_count"] = _count_by_length(found["text"])
                yield group, pa.RecordBatch.from_pydict({name: found[name] for name in columns})


def _count_by_length(text: pa.Array) -> pa.Array:
    filled = pc.call_function("binary_length", [pc.fill_null(text, "")])
    counts = -(-filled.to_numpy(zero_copy_only=False).astype(np.int64) // BYTES_PER_TOKEN)
    return pa.array(counts, pa.int64())


def _checked(batch: pa.RecordBatch, where: str, first_row: int) -> pa.RecordBatch:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count:
            row = first_row + pc.index(column.is_null(), True).as_py()
            raise InputError(
                f"{where}, row {row}: expected a value in {name!r}, found null; "
                "drop such rows from the source"
            )
    if "token_count" in batch.schema.names:
        negative = np.flatnonzero(batch.column("token_count").to_numpy() < 0)
        if len(negative):
            raise InputError(
                f"{where}, row {first_row + negative[0]}: 'token_count' is negative; "
                "correct it, or leave the column out of the source"
            )
    return batch


def _embedded_rows(rows: int) -> list[range]:
    """The virtual row groups of the embedded table, so that it fans out like any source."""
    edges = [rows * index // EMBEDDED_ROW_GROUPS for index in range(EMBEDDED_ROW_GROUPS + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _embedded_units(source: str) -> list[Unit]:
    table = embedded.documents()
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
