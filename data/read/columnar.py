"""Parquet and Arrow files as documents: columns by name, of any of Arrow's types.

Parquet is read by row group with column projection, so ids and token counts do not fetch the text.
Arrow streams (as in the `datasets` cache) and files with a footer are both read message by message,
to an end that is checked: a stream has an end marker and can be followed by another one of the same
columns; a file's batches end at its footer, which has their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain

import pyarrow as pa

from data.read import parquet_file
from data.read.arrow_file import arrow_file, whole
from data.read.byte_ranges import FileState, open_ranges
from data.read.parquet_file import RowGroup, open_parquet
from data.read.retry import redact
from data.read.unit import BATCH_BYTES, BATCH_ROWS, SCORE, Fields, Rows, Unit
from data.read.values import check_structure, converted, count_by_length, is_text, joined, pieces
from pipeline.errors import InputError

_STEP_ROWS = 32
_MAGIC = b"ARROW1"
_FIRST = 8  # the first byte of a file's stream, behind the magic bytes and their padding
_END, _OLD_END = b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0"


def cut_parquet(url: str, state: FileState, fields: Fields, target_bytes: int) -> list[Unit]:
    """Units of neighbouring row groups with about `target_bytes` of text each."""
    whole, found = row_groups(url, state, fields)
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


def row_groups(url: str, state: FileState, fields: Fields) -> tuple[Unit, list[RowGroup]]:
    """The file as one unit, and its row groups."""
    with open_parquet(url, state) as parquet:  # its names may not be UTF-8
        whole = unit_of(url, state, parquet.schema_arrow, fields)
        parquet_file.check_footer(url, state, parquet.metadata)
        wanted = {name for name in names_of(whole).values() if name is not None}
        found = parquet_file.row_groups(url, parquet.metadata, fields.text, wanted)
    return whole, found


def cut_arrow(url: str, state: FileState, fields: Fields, target_bytes: int) -> list[Unit]:
    """The file as its only unit."""
    del target_bytes
    with _open_arrow(url, state) as source:
        source.seek(_FIRST if _footer(source) else 0)
        schema = pa.ipc.open_stream(source).schema
    return [replace(unit_of(url, state, schema, fields), kind="arrow")]


def unit_of(url: str, state: FileState, schema: pa.Schema, fields: Fields) -> Unit:
    """The whole file as one unit with an unknown number of rows, from the names in its schema."""
    text, score = fields.text, fields.score
    id = fields.id or ("id" if "id" in schema.names else None)
    for argument, name in (("text", text), ("id", id)):
        if name is None:
            continue
        if schema.names.count(name) != 1:
            raise InputError(
                f"{redact(url)}: expected one column {name!r} for the {argument}, found columns "
                f"{', '.join(schema.names)}; pass {argument}=<name of the column>"
            )
        kind = schema.field(name).type
        if not (is_text(kind) or (argument == "id" and pa.types.is_integer(kind))):
            raise InputError(
                f"{redact(url)}: column {name!r} has type {kind}, expected a string; "
                f"pass {argument}=<name of a string column>"
            )
    counted = schema.names.count("token_count")
    if counted > 1 or (counted and not pa.types.is_integer(schema.field("token_count").type)):
        found = f"type {schema.field('token_count').type}" if counted == 1 else f"{counted} of them"
        raise InputError(
            f"{redact(url)}: column 'token_count' has {found}, expected one of an integer type; "
            "write it as int64, or leave the column out"
        )
    for name in fields.columns:
        if schema.names.count(name) != 1:
            raise InputError(
                f"{redact(url)}: expected one column {name!r}, found columns "
                f"{', '.join(schema.names)}; name other columns"
            )
    kind = schema.field(score).type if schema.names.count(score) == 1 else pa.null()
    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    columns = {"id": id, "counted": bool(counted), "score": score if numeric else None}
    return Unit.of(url, state, fields, **columns)


def names_of(unit: Unit) -> dict[str, str | None]:
    """The file's name of each field; None for one that it does not have."""
    count = "token_count" if unit.counted else None
    names = {"id": unit.id, "text": unit.text, "token_count": count, SCORE: unit.score}
    return {**{name: name for name in unit.columns}, **names}


def read(units: Sequence[Unit], columns: Sequence[str]) -> Iterator[Rows]:
    """The rows of one unit with `columns`, and the text if ids need it."""
    (unit,) = units
    names = names_of(unit)
    length = "token_count" in columns and not unit.counted
    wanted = {name for name in columns if names[name] is not None}
    if length or ("id" in columns and unit.id is None):
        wanted.add("text")

    with _raw(unit, sorted({str(names[name]) for name in wanted})) as raws:
        for group, batches in raws:
            first = 0
            for piece in chain.from_iterable(map(pieces, batches)):
                found: dict[str, pa.Array] = {}
                invalid: dict[int, str] = {}
                for name in sorted(wanted):
                    known = str(names[name])
                    found[name], wrong = converted(name, known, piece.column(known))
                    invalid |= wrong
                if length:
                    found["token_count"] = count_by_length(found["text"])
                batch = pa.RecordBatch.from_pydict(found)
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
    state = FileState(unit.size, unit.version) if unit.size else None
    if unit.kind == "arrow":
        with _open_arrow(unit.file, state) as source:
            yield iter([(0, _arrow_batches(source, columns))])
        return
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


def _arrow_batches(source: pa.NativeFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The batches of a file or stream with `columns`; their structure is sound."""
    footer = _footer(source)
    at, (end, batches, schema) = (_FIRST, footer) if footer else (0, (source.size(), 0, None))
    count = 0
    while at < end:
        source.seek(at)
        whole = pa.ipc.open_stream(source).schema
        if schema is not None and not whole.equals(schema, check_metadata=footer is not None):
            raise pa.ArrowInvalid(f"a stream of other columns at byte {at:,}")
        schema = whole
        source.seek(at)
        fields = [whole.get_field_index(name) for name in columns]
        reader = pa.ipc.open_stream(
            source, options=pa.ipc.IpcReadOptions(included_fields=sorted(fields))
        )
        while (at := source.tell()) != end or not footer:
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                at = _behind_end(source, at)
                break
            check_structure(batch)
            count += 1
            yield batch.select(list(columns))
    if footer and (at, count) != (end, batches):
        raise pa.ArrowInvalid(
            f"{count:,} batches up to byte {at:,}, where the footer has {batches:,} up to "
            f"byte {end:,}"
        )


def _footer(source: pa.NativeFile) -> tuple[int, int, pa.Schema] | None:
    """(first byte of a file's footer, number of batches, columns); None for a stream."""
    source.seek(0)
    if source.read(len(_MAGIC)) != _MAGIC:
        return None
    file = pa.ipc.open_file(source)
    end = source.size() - len(_MAGIC) - 4
    source.seek(end)
    length = int.from_bytes(source.read(4), "little")
    return end - length, file.num_record_batches, file.schema


def _behind_end(source: pa.NativeFile, at: int) -> int:
    """The byte behind the end marker at `at`."""
    source.seek(at)
    found = source.read(len(_END))
    if found == _END:
        return at + len(_END)
    if found.startswith(_OLD_END):
        return at + len(_OLD_END)
    raise pa.ArrowInvalid(f"no end marker at byte {at:,}: a cut file, or one not closed")


@contextmanager
def _open_arrow(url: str, state: FileState | None) -> Iterator[pa.NativeFile]:
    with (
        whole(url, "Arrow file or stream"),
        open_ranges(url, state) as handle,
        arrow_file(handle) as source,
    ):
        yield source
