"""Arrow files as documents: streams (as in the `datasets` cache) and files with a footer.

Both are read as a stream, message by message, to an end that is checked: a stream has an end marker
and can be followed by another one of the same columns; a file's batches end at its footer, which
has their number. Only the columns that are asked for are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa

from data.read.arrow_file import arrow_file
from data.read.byte_ranges import FileState, open_ranges
from data.read.parquet_table import is_corrupt, one_line
from data.read.retry import redact
from data.read.unit import Unit
from data.read.values import check_structure
from pipeline.errors import InputError

_MAGIC = b"ARROW1"
_FIRST = 8  # the first byte of a file's stream, behind the magic bytes and their padding
_END, _OLD_END = b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0"


class _Footer(NamedTuple):
    """Where a file's footer begins, and the number and columns of its batches."""

    begin: int
    batches: int
    schema: pa.Schema


def schema(url: str, state: FileState) -> pa.Schema:
    """The columns of a file or stream."""
    with _open(url, state) as source:
        source.seek(_FIRST if _footer(source) else 0)
        return pa.ipc.open_stream(source).schema


@contextmanager
def open_batches(unit: Unit, columns: Sequence[str]) -> Iterator[Iterator[pa.RecordBatch]]:
    """The batches of a unit with `columns`, which are the file's own names; their structure is
    sound.

    Raises:
        InputError: the file is missing, changed or damaged (also later, in the context).
    """
    with _open(unit.file, FileState(unit.size, unit.version)) as source:
        yield _batches(source, columns)


def _batches(source: pa.NativeFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    footer = _footer(source)
    at, end = (_FIRST, footer.begin) if footer else (0, source.size())
    schema, count = footer.schema if footer else None, 0
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
    if footer and (at, count) != footer[:2]:
        raise pa.ArrowInvalid(
            f"{count:,} batches up to byte {at:,}, where the footer has {footer.batches:,} up to "
            f"byte {end:,}"
        )


def _footer(source: pa.NativeFile) -> _Footer | None:
    """The footer of a file; None for a stream."""
    source.seek(0)
    if source.read(len(_MAGIC)) != _MAGIC:
        return None
    file = pa.ipc.open_file(source)
    end = source.size() - len(_MAGIC) - 4
    source.seek(end)
    length = int.from_bytes(source.read(4), "little")
    return _Footer(end - length, file.num_record_batches, file.schema)


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
def _open(url: str, state: FileState) -> Iterator[pa.NativeFile]:
    try:
        with open_ranges(url, state) as handle, arrow_file(handle) as source:
            yield source
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if not (is_corrupt(error) or isinstance(error, UnicodeDecodeError)):
            raise
        raise InputError(
            f"{redact(url)}: expected a whole Arrow file or stream, found "
            f"{redact(one_line(error))}; fetch the file again or leave it out of the source"
        ) from error
