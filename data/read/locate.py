"""Finds documents in the files of a source, by the readers that a step reads them with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.read.byte_ranges import file_state
from data.read.parquet_file import open_parquet
from data.read.text import lines_of
from data.read.unit import Fields, Rows, Unit
from data.read.values import made_ids
from data.read.work_units import file_units, raw_rows
from pipeline.errors import InputError


class Place(NamedTuple):
    """A row of a file, from 0: of JSON lines blank ones are not counted. `text` has bytes too."""

    file: str
    row: int
    text: str


def rows_before(file: str, kind: str, begin: int) -> int:
    """Rows of a file before a row group of Parquet, or before byte `begin` of plain lines."""
    if not begin:
        return 0
    state = file_state(file)
    if kind != "lines":
        with open_parquet(file, state) as parquet:
            return sum(parquet.metadata.row_group(index).num_rows for index in range(begin))
    return sum(1 for _ in lines_of(file, state, 0, begin))


def find_ids(units: Iterable[Unit], ids: Iterable[str]) -> dict[str, list[Place]]:
    """By id, the rows of units that have it, in their order; ids without a row are left out."""
    wanted, found = pa.array(sorted(set(ids)), pa.string()), dict[str, list[Place]]()
    for unit in units:
        # One row group at a time: those of a unit need not be neighbours.
        for group in unit.row_groups:
            begin = group if unit.kind in ("parquet", "documents") else unit.begin
            first = rows_before(unit.file, unit.kind, begin)
            for rows in raw_rows(replace(unit, row_groups=(group,)), ("id",)):
                names = _ids(rows)
                inside = pc.call_function("is_in", [names], pc.SetLookupOptions(wanted))
                for row in np.flatnonzero(inside.to_numpy(zero_copy_only=False)).tolist():
                    place = Place(unit.file, first + row, rows.place(row))
                    found.setdefault(names[row].as_py(), []).append(place)
                first += rows.batch.num_rows
    return found


def id_of_row(file: str, row: int, fields: Fields) -> str:
    """The id of a row of a file of a source; `InputError` if it has fewer rows."""
    first = 0
    for unit in file_units(file, fields):
        for rows in raw_rows(unit, ("id",)):
            if row < first + rows.batch.num_rows:
                return str(_ids(rows)[row - first].as_py())
            first += rows.batch.num_rows
    raise InputError(f"{file}: expected a row {row:,}, counted from 0, found {first:,} rows")


def _ids(rows: Rows) -> pa.Array:
    if "id" in rows.batch.schema.names:
        return rows.batch.column("id")
    return made_ids(rows.batch.column("text").fill_null(""))
