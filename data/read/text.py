"""JSON lines, one document each, and text files, also one each; plain or compressed.

A plain file of lines is divided at line ends into units that are read separately; a compressed file
is one unit. A line's place is the byte at which it begins (of the decompressed file).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import IO, Annotated, Any

import msgspec
import pyarrow as pa

from data.read.byte_ranges import FileState
from data.read.formats import READ, compression, open_stream
from data.read.retry import redact
from data.read.unit import BATCH_BYTES, BATCH_ROWS, MOST_TEXT, SCORE, Fields, Rows, Unit
from data.read.values import count_by_length
from pipeline.errors import InputError

_BLOCK = 4 << 20
_PACKED = 4  # typical compression ratio of text
_BOM = b"\xef\xbb\xbf"
_SHOWN = 60
_LONE = re.compile(rb"(?i)\\ud[89ab]..(?!\\ud[c-f])|(?<!\\ud[89ab]..)\\ud[c-f]")
"""An escape of half a character outside the Basic Multilingual Plane, without the other half."""
_MOST_TOKENS = 1 << 60
_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)


def cut_lines(url: str, state: FileState, fields: Fields, target_bytes: int) -> list[Unit]:
    """The units of a file, of about `target_bytes` each; none of an empty file.

    The keys of the first line determine which fields the file has.
    """
    keys = _keys(url, state, fields)
    if keys is None:
        return []
    if missing := [name for name in fields.columns if name not in keys]:
        raise InputError(
            f"{redact(url)}: expected the key {missing[0]!r} in the first line, found "
            f"{redact(', '.join(keys))}; name other columns, or give the first line the key"
        )
    packed = compression(url)
    step = state.size if packed else max(target_bytes, 1)
    columns = {
        "id": fields.id or ("id" if "id" in keys else None),
        "counted": "token_count" in keys,
        "score": fields.score if fields.score in keys else None,
    }
    return [
        Unit.of(
            url,
            state,
            fields,
            kind="lines",
            text_bytes=(min(begin + step, state.size) - begin) * (_PACKED if packed else 1),
            begin=begin,
            end=0 if packed else begin + step,
            **columns,
        )
        for begin in range(0, max(state.size, 1), max(step, 1))
    ]


def read_lines(units: Sequence[Unit], columns: Sequence[str]) -> Iterator[Rows]:
    """The rows of one unit with `columns`."""
    (unit,) = units
    state = FileState(unit.size, unit.version)
    score = _score_of(unit, columns)
    decoder, others = _decoder(unit, score), _others(unit).values()
    rows: list[Any] = []
    begins: list[int] = []
    invalid: dict[int, str] = {}
    size = 0
    for begin, line in lines_of(unit.file, state, unit.begin, unit.end):
        try:
            rows.append(decoder.decode(line))
            for attribute in others:
                _value(getattr(rows[-1], attribute))
            if score is not None:
                _number(getattr(rows[-1], score))
            if rows[-1].text is msgspec.UNSET:
                raise ValueError(f"no key {unit.text!r}")
        except _ERRORS as error:
            invalid[len(begins)] = _wrong(error, line)
            rows[len(begins) :] = [None]
        begins.append(begin)
        size += len(line)
        if size >= BATCH_BYTES or len(rows) >= BATCH_ROWS:
            yield _rows(unit, rows, begins, invalid, columns)
            rows, begins, invalid, size = [], [], {}, 0
    if rows:
        yield _rows(unit, rows, begins, invalid, columns)


def _decoder(unit: Unit, score: str | None) -> msgspec.json.Decoder:
    """A decoder of the fields that are used; it skips all others without building objects."""
    missing: Any = msgspec.UNSET
    kinds: dict[str, Any] = {
        "text": str | None | msgspec.UnsetType,
        "id": str | int | None,
        "token_count": Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)] | None,
        "score": float | None,
    }
    names = {"text": unit.text, "id": unit.id, "token_count": "token_count"}
    if score == "score":
        names[score] = unit.score
    used = [name for name in kinds if names.get(name) is not None]
    known = {str(names[name]) for name in used}
    other = {f"column{n}": key for n, key in enumerate(unit.columns) if key not in known}
    row = msgspec.defstruct(
        "Row",
        [(name, kinds[name], missing if name == "text" else None) for name in used]
        + [(name, msgspec.Raw, msgspec.Raw(b"null")) for name in other],
        rename={name: str(names[name]) for name in used} | other,
    )
    return msgspec.json.Decoder(row)


def _rows(
    unit: Unit, rows: list[Any], begins: list[int], invalid: dict[int, str], columns: Sequence[str]
) -> Rows:
    texts = pa.array([row and row.text for row in rows], pa.string())
    found: dict[str, pa.Array] = {"text": texts} if unit.id is None or "text" in columns else {}
    if "id" in columns and unit.id is not None:
        ids = [None if row is None or row.id is None else str(row.id) for row in rows]
        found["id"] = pa.array(ids, pa.string())
    if "token_count" in columns:
        counts = [row and row.token_count for row in rows] if unit.counted else None
        found["token_count"] = (
            count_by_length(texts) if counts is None else pa.array(counts, pa.int64())
        )
    if (score := _score_of(unit, columns)) is not None:
        values = [row and _number(getattr(row, score)) for row in rows]
        found[SCORE] = pa.array(values, pa.float64())
    for name, attribute in _others(unit).items():
        if name in columns:
            values = [row and getattr(row, attribute) for row in rows]
            found[name] = pa.array([_value(value) for value in values], pa.string())

    def place(row: int) -> str:
        return f"{redact(unit.file)}: the line at byte {begins[row]:,}"

    return Rows(pa.RecordBatch.from_pydict(found), invalid, place)


def _others(unit: Unit) -> dict[str, str]:
    """The attribute of a decoded row that has each other column; one key may be a field too."""
    fields = {unit.text: "text", unit.id: "id"}
    return {name: fields.get(name, f"column{n}") for n, name in enumerate(unit.columns)}


def _score_of(unit: Unit, columns: Sequence[str]) -> str | None:
    """The attribute of a decoded row that has the score; None if it is not read."""
    return _others(unit).get(str(unit.score), "score") if SCORE in columns else None


def _number(value: Any) -> Any:
    """A score, which is JSON text where it is kept as a column too."""
    raw = isinstance(value, msgspec.Raw)
    return msgspec.json.decode(value, type=float | None) if raw else value


def _value(value: Any) -> str | None:
    """A value of another column: a string itself, of anything else its JSON text."""
    if value is None or isinstance(value, str):
        return value
    raw = bytes(value) if isinstance(value, msgspec.Raw) else msgspec.json.encode(value)
    if raw == b"null":
        return None
    return msgspec.json.decode(raw, type=str) if raw.startswith(b'"') else raw.decode()


def lines_of(url: str, state: FileState, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """(first byte, line) of the non-blank lines that begin in a range; `end` 0 means no end."""
    # Start one byte early: a newline there means that a line begins exactly at `begin`.
    place = max(begin - 1, 0)
    with open_stream(url, state, place) as stream:
        for line in _split(url, stream, place):
            first, place = place, place + len(line)
            if first < begin:
                continue  # the rest of a line that belongs to the unit before
            if end and first >= end:
                return
            if first == 0:
                line = line.removeprefix(_BOM)
            if not line.isspace() and line:
                yield first, line


def _split(url: str, stream: IO[bytes], begin: int) -> Iterator[bytes]:
    """The lines of a stream that starts at byte `begin`, with their line ends."""
    held: list[bytes] = []  # parts of a line that is longer than a block
    size = 0
    while block := stream.read(_BLOCK):
        lines = block.split(b"\n")
        last = lines.pop()
        for line in lines:
            found = b"".join([*held, line, b"\n"]) if held else line + b"\n"
            begin += len(found)
            yield found
            held, size = [], 0
        if last:
            held.append(last)
            size += len(last)
        if size > MOST_TEXT:
            raise InputError(
                f"{redact(url)}: the line at byte {begin:,}: 2 GiB or more of one line; cut its "
                "document, or leave the file out of the source"
            )
    if held:
        yield b"".join(held)


def _keys(url: str, state: FileState, fields: Fields) -> list[str] | None:
    """The keys of the first line, with `skip_invalid` the first with a text; None without lines."""
    refusal = None
    for begin, line in lines_of(url, state, 0, 0):
        try:
            row = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
            if fields.text in row:
                msgspec.json.decode(row[fields.text], type=str | None)
                return list(row)
            found = redact(", ".join(row)) or "none"
            wrong = (
                f"expected the key {fields.text!r} for the text, found {found}; "
                "pass text=<name of the key>"
            )
        except _ERRORS as error:
            wrong = _wrong(error, line)
        refusal = refusal or f"{redact(url)}: the line at byte {begin:,}: {wrong}"
        if not fields.skip_invalid:
            break
    if refusal is not None:
        raise InputError(refusal)
    return None


def _wrong(error: Exception, line: bytes) -> str:
    """What is wrong with a line; msgspec takes half a surrogate pair for the end of the data."""
    whole = "truncated" in str(error) and line.rstrip().endswith(b"}")
    lone = whole and _LONE.search(line)
    reason = "a lone surrogate, which UTF-8 cannot express" if lone else str(error)
    shown = line[:_SHOWN].decode("utf-8", "replace").strip()
    return f"expected a JSON object with a document, found {shown!r} ({reason}); repair the line"


def cut_text(url: str, state: FileState, fields: Fields, target_bytes: int) -> list[Unit]:
    """The file as its only unit."""
    del target_bytes
    if fields.columns:
        raise InputError(
            f"{redact(url)}: expected columns {', '.join(fields.columns)}, found a text file, "
            "which has none; use JSON lines or Parquet"
        )
    size = state.size * (_PACKED if compression(url) else 1)
    about = {"kind": "text", "rows": 1, "text_bytes": size, "text": "text", "id": None}
    return [Unit.of(url, state, fields, **about, counted=False)]


def read_text(units: Sequence[Unit], columns: Sequence[str]) -> Iterator[Rows]:
    """The files of some units as rows with `columns`."""
    texts: list[str | None] = []
    invalid: dict[int, str] = {}
    first = size = 0

    def rows(files: Sequence[Unit]) -> Rows:
        found = {"text": pa.array(texts, pa.string())}
        if "token_count" in columns:
            found["token_count"] = count_by_length(found["text"])
        batch = pa.RecordBatch.from_pydict(found)
        return Rows(batch, invalid, lambda row: redact(files[row].file))

    for index, unit in enumerate(units):
        # A file is asked for no more than it has: Python allocates what is asked for.
        most = MOST_TEXT if compression(unit.file) else min(MOST_TEXT, unit.size)
        with open_stream(unit.file, FileState(unit.size, unit.version)) as stream:
            content = stream.read(most + 1)
        if texts and size + len(content) > BATCH_BYTES:
            yield rows(units[first:index])
            texts, invalid, first, size = [], {}, index, 0
        try:
            texts.append(_text(content))
        except ValueError as error:
            invalid[len(texts)] = str(error)
            texts.append(None)
        size += len(content)
    yield rows(units[first:])


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
