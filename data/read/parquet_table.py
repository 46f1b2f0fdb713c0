"""The pipeline's own Parquet files: written with page checksums, read with every page verified.

Without page checksums most flipped bits in a Parquet file silently read as other text; with them
they raise `CorruptOutput`. An unfinished file has no footer and cannot be read at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from data.read.arrow_file import arrow_file, is_corrupt, one_line
from data.read.unit import SCORE, Rows, Unit
from pipeline.errors import CorruptOutput
from pipeline.store import storage

_BATCH_ROWS = 1024
_ROW_GROUP_BYTES = 16 << 20


class TableWriter:
    """Writes one Parquet file: zstd, page checksums, row groups of about 16 MiB.

    A context manager. If its body raises, no footer is written, so the file cannot be read.
    """

    def __init__(self, url: str, schema: pa.Schema) -> None:
        self._file = storage.open_write(url)
        self._schema = schema
        self._writer = pq.ParquetWriter(
            self._file, schema, compression="zstd", write_page_checksum=True
        )
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self._flush()
                self._writer.close()
        finally:
            self._writer.is_open = False  # or its finaliser would write a footer
            self._file.close()

    def write(self, batch: pa.RecordBatch) -> None:
        self._pending.append(batch)
        self._pending_bytes += batch.nbytes
        if self._pending_bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._writer.write_table(pa.Table.from_batches(self._pending, self._schema))
        self._pending, self._pending_bytes = [], 0


def read_table(
    url: str, columns: Sequence[str] | None = None, row_groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a file that `TableWriter` wrote, every page checked against its checksum."""
    with (
        _as_corrupt(url),
        storage.open_read(url) as handle,
        arrow_file(handle) as source,
        pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=True) as file,
    ):
        for group in range(file.num_row_groups) if row_groups is None else row_groups:
            yield from file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns)


def read_rows(units: Sequence[Unit], columns: Sequence[str]) -> Iterator[Rows]:
    """The rows of one unit of such a file, with `columns`."""
    (unit,) = units
    names = {name: str(unit.score) if name == SCORE else name for name in columns}
    stored = list(dict.fromkeys(names.values()))
    for batch in read_table(unit.file, stored, unit.row_groups):
        found = pa.RecordBatch.from_pydict(
            {
                name: batch.column(own).cast(pa.float64(), safe=False)
                if name == SCORE
                else batch.column(own)
                for name, own in names.items()
            }
        )
        yield Rows(found, {}, lambda row: f"{unit.file}: row {row} of a batch")


def count_row_groups(url: str) -> int:
    """Number of row groups of a file that `TableWriter` wrote, from its footer."""
    with _as_corrupt(url), storage.open_read(url) as handle, pq.ParquetFile(handle) as file:
        return file.num_row_groups


@contextmanager
def _as_corrupt(url: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if not is_corrupt(error):
            raise
        raise CorruptOutput(
            f"{url}: expected the Parquet file written earlier, found {one_line(error)}; "
            "rebuild the step that wrote it"
        ) from error
