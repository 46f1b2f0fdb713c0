"""Parquet and Arrow files as documents: columns by name, of any of Arrow's types.

Parquet is read by row group with column projection, so ids and token counts do not fetch the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pyarrow as pa

from data.read import arrow_table, parquet_file
from data.read.arrow_strings import count_by_length
from data.read.byte_ranges import FileState
from data.read.parquet_file import RowGroup, open_parquet
from data.read.retry import redact
from data.read.unit import BATCH_BYTES, BATCH_ROWS, Fields, Rows, Unit
from data.read.values import converted, is_text, joined, pieces
from pipeline.errors import InputError

_STEP_ROWS = 32


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
    return [replace(unit_of(url, state, arrow_table.schema(url, state), fields), kind="arrow")]


def unit_of(url: str, state: FileState, schema: pa.Schema, fields: Fields) -> Unit:
    """The whole file as one unit with an unknown number of rows, from the names in its schema.

    Raises:
        InputError: the text or a named id is missing; or text, id or `token_count` is duplicated or
            has the wrong type.
    """
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
    numeric = schema.names.count(score) == 1 and _is_number(schema.field(score).type)
    columns = {"id": id, "counted": bool(counted), "score": score if numeric else None}
    return Unit.of(url, state, fields, **columns)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def names_of(unit: Unit) -> dict[str, str | None]:
    """The file's name of each field; None for one that it does not have."""
    count = "token_count" if unit.counted else None
    return {"id": unit.id, "text": unit.text, "token_count": count, "score": unit.score}


def read(units: Sequence[Unit], columns: Sequence[str]) -> Iterator[Rows]:
    """The rows of one unit with `columns`, and the text if ids need it."""
    (unit,) = units
    names = names_of(unit)
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
