"""Text files, plain or compressed, as one document each."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from data.read.arrow_strings import count_by_length
from data.read.byte_ranges import FileState
from data.read.formats import READ, compression, open_stream
from data.read.retry import redact
from data.read.unit import Fields, Unit
from pipeline.errors import InputError

_PACKED = 4  # typical compression ratio of text
_MOST = (1 << 31) - 1  # most bytes of an Arrow string array


def cut(url: str, state: FileState, fields: Fields, target_bytes: int) -> list[Unit]:
    """The file as its only unit."""
    del target_bytes
    return [
        Unit(
            file=url,
            row_groups=(0,),
            rows=1,
            text_bytes=state.size * (_PACKED if compression(url) else 1),
            id=None,
            counted=False,
            size=state.size,
            version=state.version,
            kind="text",
            skip_nulls=fields.skip_nulls,
        )
    ]


def read(units: Sequence[Unit], columns: Sequence[str]) -> pa.RecordBatch:
    """The documents, with `columns` and always `text`, from which their ids are computed.

    Raises:
        InputError: a file is not UTF-8, or is 2 GiB or longer.
    """
    texts = pa.array(map(_text, units), pa.string(), size=len(units))
    found = {
        "text": texts,
        "id": pa.nulls(len(units), pa.string()),
        "token_count": count_by_length(texts),
    }
    return pa.RecordBatch.from_pydict({n: found[n] for n in dict.fromkeys((*columns, "text"))})


def _text(unit: Unit) -> str:
    with open_stream(unit.file, FileState(unit.size, unit.version)) as stream:
        content = stream.read(_MOST + 1)
    if len(content) > _MOST:
        raise InputError(f"{redact(unit.file)}: 2 GiB or more of one text; cut the file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{redact(unit.file)}: expected {READ}, found bytes that are not UTF-8 (byte "
            f"{error.start:,}); convert the file, or leave it out of the source"
        ) from None
