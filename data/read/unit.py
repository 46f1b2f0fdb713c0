"""The piece of a source that one task reads, and what its documents' fields are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BATCH_ROWS = 1024
BATCH_BYTES = 16 << 20  # of text in one batch, unless one document is longer
BYTES_PER_TOKEN = 4  # of English text, where nothing has counted it
UNKNOWN = -1


class Fields(NamedTuple):
    """What a source calls what is read of a document.

    Attributes:
        text: the column or key of the text.
        id: that of the id, which must be there; None for "id" where there is one, and else an id
            made of the text.
        score: that of a number that may be asked for.
        skip_nulls: leave out, and count, a row in which one of these is null.
    """

    text: str = "text"
    id: str | None = None
    score: str = "score"
    skip_nulls: bool = False


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A part of one source file: row groups of Parquet, lines, or the whole file.

    Attributes:
        file: URL of the file, or of the embedded documentation.
        row_groups: of Parquet, their indices, ascending and adjacent; (0,) of all else.
        rows: documents in them; -1 where only reading tells.
        text_bytes: of Parquet the uncompressed bytes of the text column by the footer (a few bytes
            per document more than the text itself), else about the bytes read.
        id: the file's name for the id; None for ids made of the text.
        text: the file's name for the text.
        counted: whether the file has a `token_count`.
        score: the file's name for the score, a number; None when it has none.
        size: bytes of the file when it was cut into units; 0 where that is not known.
        version: what its store called its content then, see `data.read.byte_ranges.FileState`.
        kind: what the file is, see `data.read.formats`.
        begin, end: of lines, those that begin at these bytes; 0 and 0 for all.
        skip_nulls: leave out rows with a null.
    """

    file: str
    row_groups: tuple[int, ...]
    rows: int
    text_bytes: int
    id: str | None = "id"
    text: str = "text"
    counted: bool = True
    score: str | None = None
    size: int = 0
    version: str = ""
    kind: str = "parquet"
    begin: int = 0
    end: int = 0
    skip_nulls: bool = False
