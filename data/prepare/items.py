"""The documents that one task reads, of a source or of another step's output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa

from data.read import columnar
from data.read.byte_ranges import file_state
from data.read.unit import Fields, Unit
from data.read.work_units import read_units
from data.select.split_writer import COLUMNS


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


def stored_unit(file: str, score: str = "score") -> Unit:
    """All rows of a file that a step wrote, with its other columns, one of which is the score."""
    state = file_state(file)
    whole, groups = columnar.row_groups(file, state, Fields(score=score))
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
