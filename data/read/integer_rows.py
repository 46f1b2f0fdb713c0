"""Reads rows of integers from Parquet files: one list of ids per row, with an optional loss mask.

For tokens that do not come from a text tokenizer (lattice sites, densities, image codes), already
cut into rows. Nothing is inferred: a value that is not a list of integers in range is an
`InputError` with file, row group and row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from data.read.byte_ranges import file_state
from data.read.parquet_file import check_footer, open_parquet
from data.read.retry import redact
from data.read.unit import BATCH_BYTES
from data.read.work_units import FOOTERS_AT_ONCE, list_files
from pipeline.errors import InputError


@dataclass(frozen=True, kw_only=True)
class RowSpan:
    """Rows `begin` to `end` - 1 of one row group."""

    file: str
    row_group: int
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """The format of a row.

    Attributes:
        column: column of the ids, one list of integers per row.
        mask_column: column of lists of booleans or integers, one per id: 0 excludes a token's
            prediction from the loss; None for no mask.
        padding: an id that is never predicted; None for none.
    """

    column: str
    mask_column: str | None
    length: int
    vocab_size: int
    padding: int | None

    @property
    def columns(self) -> list[str]:
        return [self.column] if self.mask_column is None else [self.column, self.mask_column]


def list_spans(source: str, layout: RowFormat) -> list[RowSpan]:
    """Every row group of a source, in the order of file names; reads footers only."""
    files = [url for url, _ in list_files(source)]
    with ThreadPoolExecutor(min(FOOTERS_AT_ONCE, len(files))) as pool:
        found = pool.map(lambda url: _spans(url, layout), files)
        return [span for spans in found for span in spans]


def _spans(url: str, layout: RowFormat) -> list[RowSpan]:
    state = file_state(url)
    with open_parquet(url, state) as file:
        check_footer(url, state, file.metadata)
        schema = file.schema_arrow
        for name in layout.columns:
            kind = schema.field(name).type if name in schema.names else None
            if kind is None or not _holds_integers(kind):
                raise InputError(
                    f"{redact(url)}: expected a column {name!r} of lists of integers, found "
                    f"{kind or 'none'}; there are {', '.join(schema.names)}"
                )
        rows = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    return [
        RowSpan(file=url, row_group=i, begin=0, end=count) for i, count in enumerate(rows) if count
    ]


def _holds_integers(kind: pa.DataType) -> bool:
    if not (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ):
        return False
    return pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)


def read_rows(span: RowSpan, layout: RowFormat) -> Iterator[np.ndarray]:
    """Batches of rows, int64 [row, layout.length], in the format of a masked token cache.

    An id that is not predicted is stored as id + `vocab_size`: the first of a row, one with mask 0,
    the padding id, and the zeros that fill a short row.
    """
    at = 0
    where = f"{redact(span.file)}: row group {span.row_group}"
    rows = max(1, BATCH_BYTES // (8 * layout.length))
    with open_parquet(span.file, file_state(span.file)) as file:
        for batch in file.iter_batches(rows, row_groups=[span.row_group], columns=layout.columns):
            first, at = at, at + batch.num_rows
            begin, end = max(span.begin, first), min(span.end, at)
            if begin < end:
                yield _stored(batch.slice(begin - first, end - begin), layout, where, begin)
    if at < span.end:
        raise InputError(f"{where}: expected {span.end:,} rows, found {at:,}; fetch the file again")


def _stored(batch: pa.RecordBatch, layout: RowFormat, where: str, first: int) -> np.ndarray:
    values, sizes = _flat(batch.column(layout.column), layout.column, where, first)
    if (long := np.flatnonzero(sizes > layout.length)).size:
        row = long[0]
        raise InputError(
            f"{where}, row {first + row}: expected at most sequence_length={layout.length} ids, "
            f"found {sizes[row]}; give a longer sequence_length or cut the rows"
        )
    if (wrong := np.flatnonzero((values < 0) | (values >= layout.vocab_size))).size:
        row = np.searchsorted(np.cumsum(sizes), wrong[0], side="right")
        raise InputError(
            f"{where}, row {first + row}: expected ids from 0 to vocab_size - 1 = "
            f"{layout.vocab_size - 1}, found {values[wrong[0]]}"
        )
    values, predicted = values.astype(np.int64), np.ones(len(values), bool)
    if layout.mask_column is not None:
        name = layout.mask_column
        mask, of_mask = _flat(batch.column(name), name, where, first)
        if (other := np.flatnonzero(of_mask != sizes)).size:
            row = other[0]
            raise InputError(
                f"{where}, row {first + row}: expected {sizes[row]} entries in {name!r}, as many "
                f"as ids, found {of_mask[row]}"
            )
        predicted &= mask != 0
    if layout.padding is not None:
        predicted &= values != layout.padding
    rows = np.full((len(sizes), layout.length), layout.vocab_size, np.int64)
    inside = np.arange(layout.length) < sizes[:, None]
    rows[inside] = np.where(predicted, values, values + layout.vocab_size)
    first_ids = rows[:, 0]  # a view; no id before them could predict them
    first_ids += layout.vocab_size * (first_ids < layout.vocab_size)
    return rows


def _flat(column: pa.Array, name: str, where: str, first: int) -> tuple[np.ndarray, np.ndarray]:
    """The concatenated values of a column of lists, and the number of values of each row."""
    nulls = column.is_null().to_numpy(zero_copy_only=False)
    if column.null_count or column.flatten().null_count:
        row = f", row {first + np.flatnonzero(nulls)[0]}" if nulls.any() else ""
        raise InputError(f"{where}{row}: found a null in {name!r}; repair or leave out the row")
    sizes = column.value_lengths().to_numpy(zero_copy_only=False)
    return column.flatten().to_numpy(zero_copy_only=False), sizes


def divide(
    spans: Sequence[RowSpan], order: Sequence[int], splits: Sequence[tuple[str, int]]
) -> dict[str, list[RowSpan]]:
    """Spans of each split: held-out splits take row groups in `order` and cut the last one.

    Neighbouring rows, which may be similar, stay in one split, except in one row group per split.

    Args:
        order: a permutation of the spans' indices.
        splits: (split, rows) in the order of filling; the rest is "train".
    """
    available, asked = sum(s.end - s.begin for s in spans), sum(rows for _, rows in splits)
    if asked >= available:
        raise InputError(
            f"splits: expected fewer held-out rows than the source's {available:,}, got {asked:,}"
        )
    left, found = list(order), {}
    rest: dict[int, RowSpan] = dict(enumerate(spans))
    for split, rows in splits:
        taken = []
        while rows:
            index = left[0]
            span = rest[index]
            cut = min(span.end, span.begin + rows)
            taken.append(replace(span, end=cut))
            rows -= cut - span.begin
            if cut == span.end:
                del rest[index]
                left.pop(0)
            else:
                rest[index] = replace(span, begin=cut)
        found[split] = taken
    return {"train": list(rest.values()), **found}
