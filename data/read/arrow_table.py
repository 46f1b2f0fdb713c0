"""Arrow files as documents: streams (as in the `datasets` cache) and files with a footer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pyarrow as pa

from data.read.arrow_file import arrow_file
from data.read.byte_ranges import FileState, open_ranges
from data.read.parquet_file import unit_of
from data.read.parquet_table import is_corrupt, one_line
from data.read.retry import redact
from data.read.unit import BATCH_ROWS, Fields, Unit
from pipeline.errors import InputError

Reader = pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader
_MAGIC = b"ARROW1"


def cut(url: str, state: FileState, fields: Fields, target_bytes: int) -> list[Unit]:
    """The file as its only unit."""
    del target_bytes
    with _open(url, state) as reader:
        return [replace(unit_of(url, state, reader.schema, fields), kind="arrow")]


def read(unit: Unit, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Batches of a unit with `columns`, which are the file's own names."""
    with _open(unit.file, FileState(unit.size, unit.version)) as reader:
        for batch in _all(reader):
            batch = batch.select(list(columns))
            for begin in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(begin, BATCH_ROWS)


def _all(reader: Reader) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    else:
        yield from reader


@contextmanager
def _open(url: str, state: FileState) -> Iterator[Reader]:
    try:
        with open_ranges(url, state) as handle:
            head = handle.read(len(_MAGIC))
            handle.seek(0)
            with arrow_file(handle) as source:
                opened = pa.ipc.open_file if head == _MAGIC else pa.ipc.open_stream
                yield opened(source)
    except (pa.ArrowException, OSError) as error:
        if not is_corrupt(error):
            raise
        raise InputError(
            f"{redact(url)}: expected a whole Arrow file or stream, found {one_line(error)}; "
            "fetch the file again or leave it out of the source"
        ) from error
