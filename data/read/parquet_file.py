"""One Parquet file of a source: opened by byte ranges, with checks of footer and schema.

A corrupt file is an `InputError` that names the file. Page checksums are verified; in a file
without any, as most published ones are, a flipped bit can read as other text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from data.read.arrow_file import arrow_file, is_corrupt, one_line, unsound, whole
from data.read.byte_ranges import FileState, RangeFile, open_ranges
from pipeline.errors import PonenteError

_FOOTERS_KEPT = 8
_KIND = "Parquet file"
_MAGIC = b"PAR1"
_LONGEST_INDEX = 1 << 20
_BEGINNINGS = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK": "zip",
    b"<": "a page of HTML or XML",
    b"{": "JSON",
    b"[": "JSON",
    b"PARE": "Parquet with an encrypted footer",
}


class RowGroup(NamedTuple):
    """Sizes of a row group, from the footer of its file."""

    rows: int
    text_bytes: int  # of the text column, uncompressed
    compressed_bytes: int  # in the file, of the columns id, text, token count and score


@contextmanager
def open_parquet(url: str, state: FileState | None = None) -> Iterator[pq.ParquetFile]:
    """The Parquet file at a URL, which fetches only the bytes that are read.

    With a `state`, which the file must then have, the footer is cached.
    """
    with whole(url, _KIND):
        footer = _footer(url, state) if state is not None and state.version else None
        with (
            open_ranges(url, state) as handle,
            arrow_file(handle) as source,
            _parquet(url, handle, source, footer) as parquet,
        ):
            yield parquet


@functools.lru_cache(maxsize=_FOOTERS_KEPT)
def _footer(url: str, state: FileState) -> pq.FileMetaData:
    with open_ranges(url, state) as handle, arrow_file(handle) as source:
        return _parquet(url, handle, source).metadata


def _parquet(
    url: str, handle: IO[bytes], source: pa.NativeFile, footer: pq.FileMetaData | None = None
) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(
            source, metadata=footer, pre_buffer=True, page_checksum_verification=True
        )
    except (pa.ArrowException, OSError) as error:
        found = _what_it_is(handle) if is_corrupt(error) else ""
        if not found:
            raise
        raise unsound(url, _KIND, f"{found} ({one_line(error)})") from error


def _what_it_is(handle: IO[bytes]) -> str:
    """The format of a file that is not Parquet, by its first bytes; "" if it is not recognised."""
    handle.seek(0)
    head = handle.read(64).lstrip()
    if not head:
        return "an empty file"
    return next((name for begin, name in _BEGINNINGS.items() if head.startswith(begin)), "")


class _FooterIsSound(PonenteError):
    """Arrow accepted a footer and went on to read the file."""


def check_footer(url: str, state: FileState, footer: pq.FileMetaData) -> None:
    """Check what a footer says of its file, before anything else is asked of it: offsets, counts,
    no encrypted columns, and that there is one file only.
    """
    # Arrow aborts the process when it returns the metadata of a corrupt or encrypted column, but
    # raises when it prepares to read one. So prepare all columns first, and stop at the first read.
    try:
        with arrow_file(RangeFile(url, FileState(state.size), _stop)) as source:
            whole = pq.ParquetFile(source, metadata=footer, pre_buffer=True)
            next(whole.iter_batches(row_groups=range(footer.num_row_groups)), None)
    except _FooterIsSound:
        pass
    except (pa.ArrowException, OSError) as error:
        raise unsound(url, f"{_KIND} that is not encrypted", one_line(error)) from error
    groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    if sum(group.num_rows for group in groups) != footer.num_rows:
        raise unsound(url, _KIND, f"row groups that do not add up to {footer.num_rows:,} rows")
    ends = [
        (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size
        for group in groups
        for column in map(group.column, range(footer.num_columns))
    ]
    between = state.size - 8 - footer.serialized_size - max(ends, default=4)
    if between < 0:
        raise unsound(url, _KIND, f"a footer {-between:,} bytes before the end of the data")
    if groups and between:  # indices of pages; or, before this file, another one of that size
        first = max(0, between - _LONGEST_INDEX)
        with open_ranges(url, state) as handle:
            handle.seek(first)
            place = handle.read(between + len(_MAGIC) - first).find(_MAGIC + _MAGIC)
        if place >= 0:
            place += first + len(_MAGIC)
            raise unsound(url, _KIND, f"two, of which the second begins at byte {place:,}")


def row_groups(url: str, footer: pq.FileMetaData, text: str, wanted: set[str]) -> list[RowGroup]:
    """The row groups of a file, by the paths of the text column and of the columns to read."""
    # A footer has names twice but no checksum: they must be consistent.
    names = [footer.schema.column(index).path for index in range(footer.num_columns)]
    for index, name in enumerate(names if footer.num_row_groups else ()):
        again = footer.row_group(0).column(index).path_in_schema
        if again != name:
            raise unsound(url, _KIND, f"one column named {name!r} and {again!r}")
    leaves = {name: index for index, name in enumerate(names)}
    found = []
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        columns = [group.column(i) for i, name in enumerate(names) if _top(name, wanted) in wanted]
        flat = [column for column in columns if column.path_in_schema in wanted]
        if any(column.num_values != group.num_rows for column in flat):
            raise unsound(
                url, _KIND, f"row group {index} without {group.num_rows:,} values per column"
            )
        compressed = sum(column.total_compressed_size for column in columns)
        uncompressed = group.column(leaves[text]).total_uncompressed_size
        found.append(RowGroup(group.num_rows, uncompressed, compressed))
    return found


def _top(leaf: str, wanted: set[str]) -> str:
    """The column that a leaf is of: itself, or the one whose lists or structs it is in."""
    return leaf if leaf in wanted else leaf.partition(".")[0]


def _stop(start: int, stop: int, left: float) -> bytes:
    raise _FooterIsSound
