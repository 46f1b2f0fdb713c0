"""Rows of JSON lines and Parquet as Python objects, for columns that are no text.

A file that changed or is damaged, and one without the columns, is an `InputError` with its URL. A
row that is no JSON object is the reader's to refuse, see `Record`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from data.read import text
from data.read.byte_ranges import FileState, file_state
from data.read.formats import compression, kind_of
from data.read.parquet_file import check_footer, open_parquet
from data.read.retry import redact
from data.read.work_units import FOOTERS_AT_ONCE, list_files
from pipeline.errors import InputError

TARGET_BYTES = 16 << 20
_BATCH_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class RecordSpan:
    """A part of a file: adjacent row groups of Parquet, or the lines that begin in a byte range.

    `end` 0 means no end.
    """

    file: str
    state: FileState
    kind: str
    begin: int
    end: int


class Record(NamedTuple):
    """One row: its columns, or `wrong`, what is wrong with it; and where it is in the source."""

    row: dict[str, Any]
    place: str
    wrong: str = ""


def record_spans(source: str, columns: Sequence[str]) -> list[RecordSpan]:
    """The spans of a source, of about 16 MiB each, in the order of files."""
    files = [url for url, _ in list_files(source)]
    with ThreadPoolExecutor(min(FOOTERS_AT_ONCE, len(files))) as pool:
        found = [
            span for spans in pool.map(lambda url: _cut(url, columns), files) for span in spans
        ]
    if not found:
        raise InputError(
            f"source {redact(source)!r}: {len(files)} files match, with 0 rows in all; give a "
            "source with conversations"
        )
    return found


def _cut(url: str, columns: Sequence[str]) -> list[RecordSpan]:
    state = file_state(url)
    kind = kind_of(url, state)
    if kind == "parquet":
        with open_parquet(url, state) as file:
            check_footer(url, state, file.metadata)
            _check(url, file.schema_arrow.names, columns)
            groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
            sizes = [group.total_byte_size if group.num_rows else 0 for group in groups]
        cuts = _cuts(sizes)
    elif kind == "lines":
        for begin, line in text.lines_of(url, state, 0, 0):
            record = _of_line(url, begin, line)
            if not record.wrong:  # one that is no object is refused, or skipped, where it is read
                _check(url, list(record.row), columns)
            break
        else:
            return []
        step = state.size if compression(url) else TARGET_BYTES
        cuts = [(at, at + step) for at in range(0, state.size, step)]
        cuts = [(0, 0)] if compression(url) else cuts
    else:
        raise InputError(
            f"{redact(url)}: expected JSON lines or Parquet, whose rows have columns, found "
            f"{kind}; convert the file, or leave it out of the source"
        )
    return [RecordSpan(file=url, state=state, kind=kind, begin=a, end=b) for a, b in cuts]


def _cuts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of neighbouring row groups that reach `TARGET_BYTES`, without those of no row."""
    found, begin, size = [], 0, 0
    for index, more in enumerate(sizes, 1):
        size += more
        if size >= TARGET_BYTES or index == len(sizes):
            found += [(begin, index)] if size else []
            begin, size = index, 0
    return found


def _check(url: str, names: Sequence[str], columns: Sequence[str]) -> None:
    if lacking := [name for name in columns if name not in names]:
        shown = redact(", ".join(names)) or "none"
        raise InputError(
            f"{redact(url)}: expected a column {lacking[0]!r} for conversations, found {shown}; "
            "pass columns=Messages(<name>) or columns=Exchange(instruction=<name>, "
            "response=<name>)"
        )


def read_records(span: RecordSpan, columns: Sequence[str]) -> Iterator[Record]:
    """The rows of a span in the order of the file."""
    if span.kind == "lines":
        for begin, line in text.lines_of(span.file, span.state, span.begin, span.end):
            yield _of_line(span.file, begin, line)
        return
    with open_parquet(span.file, span.state) as file:
        for group in range(span.begin, span.end):
            at = 0
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=list(columns)):
                try:
                    rows = batch.to_pylist()
                except UnicodeDecodeError as error:
                    raise InputError(
                        f"{redact(span.file)}: row group {group}, from row {at} on: expected "
                        f"UTF-8, found {error}; repair the row, or leave it out of the source"
                    ) from error
                for index, row in enumerate(rows, at):
                    yield Record(row, f"{redact(span.file)}: row group {group}, row {index}")
                at += batch.num_rows


def _of_line(url: str, begin: int, line: bytes) -> Record:
    place = f"{redact(url)}: the line at byte {begin:,}"
    try:
        return Record(msgspec.json.decode(line, type=dict[str, Any]), place)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return Record({}, place, f"expected a JSON object, found {line[:40]!r} ({error})")
