"""The part of a source that one task reads, and the names of its documents' fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

    from data.read.byte_ranges import FileState

BATCH_ROWS = 1024
BATCH_BYTES = 16 << 20  # most bytes of text in one batch, unless one document is longer
BYTES_PER_TOKEN = 4  # estimate for English text without a token count
MOST_TEXT = (1 << 31) - 1  # most bytes of a text, as of an Arrow string array
UNKNOWN = -1
SCORE = "\0score"  # the score in lists of columns, since another column may be named "score"
SMALL_BYTES = 4 << 20  # units with less text are read together: a task costs more than one
TOGETHER_BYTES = 32 << 20
TOGETHER = 1024  # files of one task


@dataclass(frozen=True)
class Fields:
    """The source's names for the fields of a document.

    Attributes:
        id: column or key of the id, which must exist; None uses "id" if it exists, and otherwise an
            id computed from the text.
        skip_nulls: skip and count rows in which one of these fields is null.
        skip_invalid: skip and count rows that are no document. A damaged file is refused all the
            same.
        columns: other columns or keys to read, which may have nulls. Values of JSON lines are
            strings: those that are none in the file become their JSON text.
    """

    text: str = "text"
    id: str | None = None
    score: str = "score"
    skip_nulls: bool = False
    skip_invalid: bool = False
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ours = {"id", "text", "token_count"} & set(self.columns)
        if ours or len(set(self.columns)) < len(self.columns):
            raise InputError(
                f"Fields(columns={self.columns!r}): expected names of other columns, each once; "
                "id, text and token_count are always read"
            )


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A part of one source file: row groups of Parquet, lines, or the whole file.

    Attributes:
        row_groups: indices of the Parquet row groups, ascending and adjacent; (0,) for other kinds.
        rows: number of documents; -1 if it is only known after reading.
        text_bytes: for Parquet the uncompressed bytes of the text column by the footer (a few bytes
            per document more than the text itself; of texts in a dictionary, those of different
            ones), else about the bytes read.
        size: bytes of the file when it was divided into units; 0 if not known.
        begin, end: range of bytes; the unit has the lines that begin in it; 0 and 0 for all lines.
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
    skip_invalid: bool = False
    columns: tuple[str, ...] = ()

    @classmethod
    def of(cls, url: str, state: FileState, fields: Fields, **more: Any) -> Unit:
        """A whole file, or what `more` says is different."""
        about: dict[str, Any] = {
            "row_groups": (0,),
            "rows": UNKNOWN,
            "text_bytes": state.size,
            "size": state.size,
            "version": state.version,
            "text": fields.text,
            "skip_nulls": fields.skip_nulls,
            "skip_invalid": fields.skip_invalid,
            "columns": fields.columns,
        }
        return cls(file=url, **about | more)


class Rows(NamedTuple):
    """Rows as a reader of files hands them on.

    Attributes:
        batch: the columns that were asked for, of types string, int64 and float64, with nulls; no
            `id` if it is to be computed from the text, which is there then.
        invalid: what is wrong with a row, by its index; the row's values are null.
        place: where a row is, by its index: the file, and the place in it.
    """

    batch: pa.RecordBatch
    invalid: Mapping[int, str]
    place: Callable[[int], str]


def small_together(units: Iterable[Unit]) -> Iterator[tuple[Unit, ...]]:
    """The units in order: neighbours with less than 4 MiB of text each in groups, others alone."""
    return grouped(units, lambda unit: unit.text_bytes < SMALL_BYTES, TOGETHER, TOGETHER_BYTES)


def grouped(
    units: Iterable[Unit], joins: Callable[[Unit], bool], most_units: int, most_bytes: int
) -> Iterator[tuple[Unit, ...]]:
    """The units in order: neighbours for which `joins` in groups, every other unit alone.

    The units of a group all have a `token_count`, or none of them has.
    """
    found: list[Unit] = []
    size = 0
    for unit in units:
        joined = joins(unit)
        full = len(found) == most_units or size + unit.text_bytes > most_bytes
        if found and (full or not joined or found[-1].counted != unit.counted):
            yield tuple(found)
            found, size = [], 0
        if joined:
            found.append(unit)
            size += unit.text_bytes
        else:
            yield (unit,)
    if found:
        yield tuple(found)
