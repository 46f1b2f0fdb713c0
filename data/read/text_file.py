"""Text files, plain or compressed, as one document each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from data.read.arrow_strings import count_by_length
from data.read.byte_ranges import FileState
from data.read.formats import READ, compression, open_stream
from data.read.retry import redact
from data.read.unit import BATCH_BYTES, MOST_TEXT, Fields, Rows, Unit

_PACKED = 4  # typical compression ratio of text


def cut(url: str, state: FileState, fields: Fields, target_bytes: int) -> list[Unit]:
    """The file as its only unit."""
    del target_bytes
    size = state.size * (_PACKED if compression(url) else 1)
    about = {"kind": "text", "rows": 1, "text_bytes": size, "text": "text", "id": None}
    return [Unit.of(url, state, fields, **about, counted=False)]


def read(units: Sequence[Unit], columns: Sequence[str]) -> Iterator[Rows]:
    texts: list[str | None] = []
    invalid: dict[int, str] = {}
    first = size = 0
    for index, unit in enumerate(units):
        content = _content(unit)
        if texts and size + len(content) > BATCH_BYTES:
            yield _rows(units[first:index], texts, invalid, columns)
            texts, invalid, first, size = [], {}, index, 0
        try:
            texts.append(_text(content))
        except ValueError as error:
            invalid[len(texts)] = str(error)
            texts.append(None)
        size += len(content)
    yield _rows(units[first:], texts, invalid, columns)


def _rows(
    units: Sequence[Unit],
    texts: list[str | None],
    invalid: dict[int, str],
    columns: Sequence[str],
) -> Rows:
    found = {"text": pa.array(texts, pa.string())}
    if "token_count" in columns:
        found["token_count"] = count_by_length(found["text"])
    batch = pa.RecordBatch.from_pydict(found)
    return Rows(batch, invalid, lambda row: redact(units[row].file))


def _content(unit: Unit) -> bytes:
    # A file is asked for no more than it has: Python allocates what is asked for.
    most = MOST_TEXT if compression(unit.file) else min(MOST_TEXT, unit.size)
    with open_stream(unit.file, FileState(unit.size, unit.version)) as stream:
        return stream.read(most + 1)


def _text(content: bytes) -> str:
    """Decode a file. Raises `ValueError` with what is wrong with it."""
    if len(content) > MOST_TEXT:
        raise ValueError("2 GiB or more of one text; cut the file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"expected {READ}, found bytes that are not UTF-8 (byte {error.start:,}); "
            "convert the file"
        ) from None
