"""JSON lines as documents: one object per line, plain or compressed, streamed in blocks.

A plain file is divided at line ends into units that are read separately; a compressed file is one
unit. An invalid line is an `InputError` with the byte at which it begins (of the decompressed
file).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import IO, Annotated, Any

import msgspec
import pyarrow as pa

from data.read.arrow_strings import count_by_length
from data.read.byte_ranges import FileState
from data.read.formats import compression, open_stream
from data.read.retry import redact
from data.read.unit import BATCH_BYTES, BATCH_ROWS, UNKNOWN, Fields, Unit
from pipeline.errors import InputError

_BLOCK = 4 << 20
_PACKED = 4  # typical compression ratio of text
_BOM = b"\xef\xbb\xbf"
_SHOWN = 60
_LONE = re.compile(rb"(?i)\\ud[89ab]..(?!\\ud[c-f])|(?<!\\ud[89ab]..)\\ud[c-f]")
"""An escape of half a character outside the Basic Multilingual Plane, without the other half."""
_MOST_TOKENS = 1 << 60


def cut(url: str, state: FileState, fields: Fields, target_bytes: int) -> list[Unit]:
    """The units of a file, of about `target_bytes` each; none of an empty file.

    The keys of the first line determine which fields the file has.
    """
    head = next(_lines(url, state, 0, 0), None)
    if head is None:
        return []
    keys = _keys(url, *head)
    if fields.text not in keys:
        raise InputError(
            f"{redact(url)}: expected the key {fields.text!r} for the text, found "
            f"{', '.join(keys) or 'none'}; pass text=<name of the key>"
        )
    packed = compression(url)
    step = state.size if packed else max(target_bytes, 1)
    name = fields.id or ("id" if "id" in keys else None)
    return [
        Unit(
            file=url,
            row_groups=(0,),
            rows=UNKNOWN,
            text_bytes=(min(begin + step, state.size) - begin) * (_PACKED if packed else 1),
            id=name,
            text=fields.text,
            counted="token_count" in keys,
            score=fields.score if fields.score in keys else None,
            size=state.size,
            version=state.version,
            kind="lines",
            begin=begin,
            end=0 if packed else begin + step,
            skip_nulls=fields.skip_nulls,
        )
        for begin in range(0, max(state.size, 1), max(step, 1))
    ]


def read(unit: Unit, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Batches of a unit with `columns`, of which text, id, token_count and score can be null."""
    state = FileState(unit.size, unit.version)
    decoder = _decoder(unit)
    rows: list[Any] = []
    size = 0
    for begin, line in _lines(unit.file, state, unit.begin, unit.end):
        rows.append(_row(unit, decoder, begin, line))
        size += len(line)
        if size >= BATCH_BYTES or len(rows) >= BATCH_ROWS:
            yield _batch(unit, rows, columns)
            rows, size = [], 0
    if rows:
        yield _batch(unit, rows, columns)


def _decoder(unit: Unit) -> msgspec.json.Decoder:
    """A decoder of the fields that are used; it skips all others without building objects."""
    missing: Any = msgspec.UNSET
    kinds: dict[str, Any] = {
        "text": str | None | msgspec.UnsetType,
        "id": str | int | None,
        "token_count": Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)] | None,
        "score": float | None,
    }
    names = {"text": unit.text, "id": unit.id, "token_count": "token_count", "score": unit.score}
    used = [name for name in kinds if names[name] is not None]
    row = msgspec.defstruct(
        "Row",
        [(name, kinds[name], missing if name == "text" else None) for name in used],
        rename={name: str(names[name]) for name in used},
    )
    return msgspec.json.Decoder(row)


def _row(unit: Unit, decoder: msgspec.json.Decoder, begin: int, line: bytes) -> Any:
    try:
        row = decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _wrong(unit.file, begin, line, _reason(error, line)) from None
    if row.text is msgspec.UNSET:
        raise _wrong(unit.file, begin, line, f"no key {unit.text!r}")
    return row


def _batch(unit: Unit, rows: list[Any], columns: Sequence[str]) -> pa.RecordBatch:
    texts = pa.array([row.text for row in rows], pa.string())
    found: dict[str, pa.Array] = {}
    for name in columns:
        if name == "text":
            found[name] = texts
        elif name == "id":
            ids = [None if row.id is None else str(row.id) for row in rows] if unit.id else None
            found[name] = pa.nulls(len(rows), pa.string()) if ids is None else pa.array(ids)
        elif name == "token_count":
            counts = [row.token_count for row in rows] if unit.counted else None
            found[name] = count_by_length(texts) if counts is None else pa.array(counts, pa.int64())
        else:
            found[name] = pa.array([row.score for row in rows], pa.float64())
    if unit.id is None and "id" in columns:
        found["text"] = texts  # ids are computed from it
    return pa.RecordBatch.from_pydict(found)


def _lines(url: str, state: FileState, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """(first byte, line) of the non-blank lines that begin in a range; `end` 0 means no end."""
    # Start one byte early: a newline there means that a line begins exactly at `begin`.
    place = max(begin - 1, 0)
    with open_stream(url, state, place) as stream:
        for line in _split(stream):
            first, place = place, place + len(line)
            if first < begin:
                continue  # the rest of a line that belongs to the unit before
            if end and first >= end:
                return
            if first == 0:
                line = line.removeprefix(_BOM)
            if not line.isspace() and line:
                yield first, line


def _split(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a stream, with their line ends."""
    held: list[bytes] = []  # parts of a line that is longer than a block
    while block := stream.read(_BLOCK):
        lines = block.split(b"\n")
        last = lines.pop()
        for line in lines:
            yield b"".join([*held, line, b"\n"]) if held else line + b"\n"
            held = []
        if last:
            held.append(last)
    if held:
        yield b"".join(held)


def _keys(url: str, begin: int, line: bytes) -> list[str]:
    try:
        found = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _wrong(url, begin, line, _reason(error, line)) from None
    return list(found)


def _reason(error: Exception, line: bytes) -> str:
    """Why a line cannot be decoded; msgspec takes half a surrogate pair for the end of the data."""
    whole = "truncated" in str(error) and line.rstrip().endswith(b"}")
    lone = whole and _LONE.search(line)
    return "a lone surrogate, which UTF-8 cannot express" if lone else str(error)


def _wrong(url: str, begin: int, line: bytes, reason: str) -> InputError:
    shown = line[:_SHOWN].decode("utf-8", "replace").strip()
    return InputError(
        f"{redact(url)}: the line at byte {begin:,}: expected a JSON object with a document, found "
        f"{shown!r} ({reason}); repair or leave out the line"
    )
