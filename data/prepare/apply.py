"""Calls a user's function with documents, one by one or in batches, and checks what it returns."""

from __future__ import annotations

import copy
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data.prepare.items import DocumentItem, DocumentWriter
from data.read.retry import redact
from data.read.unit import Unit
from data.read.values import impossible_counts, most_tokens_of
from data.read.work_units import read_units
from data.select.split_writer import COLUMNS
from data.select.write_sample import EMPTY_TEXT
from pipeline.errors import InputError

Document = dict[str, Any]


class Function(NamedTuple):
    """A user's functions and how to call them."""

    calls: tuple[Callable[..., Any], ...]  # one for a map; for a filter those asked in turn
    columns: tuple[tuple[str, str], ...] = ()  # (name, Arrow type) of those that they add or change
    batched: bool = False  # they take a `pa.RecordBatch`
    skip_failed: bool = False  # count documents with which one raises an error


def name_of(function: Any) -> str:
    """The name of a function, or of the class of a callable value."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "__qualname__", type(function).__qualname__)


_Where = Callable[[int], str]  # where the document of a row is, for messages
_Answer = tuple[pa.RecordBatch, Mapping[str, pa.RecordBatch]]  # what is kept, and dropped by reason
_Call = Callable[[Function, pa.RecordBatch, pa.Schema, _Where], _Answer]


def map_shard(directory: str, work: tuple[DocumentItem, Function]) -> dict[str, Any]:
    """Shard writer: what the function makes of each document of the item."""
    each = functools.partial(_one_by_one, _made)
    return _write(directory, *work, _made_batch if work[1].batched else each)


def filter_shard(directory: str, work: tuple[DocumentItem, Function]) -> dict[str, Any]:
    """Shard writer: the documents of the item that all functions keep."""
    each = functools.partial(_one_by_one, _decided)
    return _write(directory, *work, _decided_batch if work[1].batched else each)


def _write(directory: str, item: DocumentItem, function: Function, call: _Call) -> dict[str, Any]:
    tally = Counter[str]()
    with DocumentWriter(directory) as out:
        for split, batch, place in _located(item, tally):
            out.read(batch)
            schema = _with_columns(batch.schema, function.columns)
            kept, dropped = call(function, batch, schema, place)
            for reason in sorted(dropped):
                out.drop(reason, dropped[reason])
            empty = np.array([not text.strip() for text in kept.column("text").to_pylist()], bool)
            out.drop(EMPTY_TEXT, kept.filter(pa.array(empty)))
            out.write(split, kept.filter(pa.array(~empty)) if empty.any() else kept)
        out.skip(tally)
    return out.result


def _located(
    item: DocumentItem, tally: Counter[str]
) -> Iterator[tuple[str, pa.RecordBatch, _Where]]:
    for split, units in item.parts:
        # Text files share batches.
        each = [units] if units[0].kind == "text" else [(unit,) for unit in units]
        for some in each:
            first = 0
            for batch in read_units(some, item.columns, tally):
                yield split, batch, functools.partial(_place, some, batch, first)
                first += batch.num_rows


def _place(units: tuple[Unit, ...], batch: pa.RecordBatch, first: int, row: int) -> str:
    unit, id = units[0], batch.column("id")[row].as_py()
    if unit.kind == "text":
        return f"{redact(unit.file)} or a file after it: id {id!r}"
    inside = f" from byte {unit.begin:,} on" if unit.begin else ""
    if unit.kind in ("parquet", "documents"):
        inside = f" from row group {unit.row_groups[0]} on"
    return f"{redact(unit.file)}{inside}: document {first + row} (counted from 0), id {id!r}"


def _with_columns(schema: pa.Schema, columns: Iterable[tuple[str, str]]) -> pa.Schema:
    for name, kind in columns:
        field = pa.field(name, pa.type_for_alias(kind))
        index = schema.get_field_index(name)
        schema = schema.append(field) if index < 0 else schema.set(index, field)
    return schema


def _one_by_one(
    answer: Callable[[Function, Document], list[Document] | str],
    function: Function,
    batch: pa.RecordBatch,
    schema: pa.Schema,
    place: _Where,
) -> _Answer:
    """Ask a function about one document after the other: it makes some of it, or has a reason."""
    kept: list[Document] = []
    dropped: dict[str, list[int]] = defaultdict(list)
    for row, document in enumerate(batch.to_pylist()):
        try:
            answered = answer(function, document)
        except _Failed as error:
            if not function.skip_failed:
                raise InputError(
                    f"{place(row)}: {error}; repair the document or the function, or leave "
                    "such documents out with skip_failed=True"
                ) from error.__cause__
            answered = error.kind
        except TypeError as error:
            raise InputError(f"{place(row)}: {error}") from error
        if isinstance(answered, str):
            dropped[answered].append(row)
        else:
            kept += answered
    try:
        made = pa.RecordBatch.from_pylist(kept, schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{place(0)} and after it: expected columns of the types {_shown(schema)}, found "
            f"{str(error).splitlines()[0]}; return values of these types, or name others with "
            "columns="
        ) from error
    return made, {reason: batch.take(pa.array(rows)) for reason, rows in dropped.items()}


class _Failed(Exception):
    def __init__(self, function: Any, error: Exception, document: Document) -> None:
        self.kind = f"failed with {type(error).__name__}"
        lines = str(error).strip().splitlines() or [""]
        super().__init__(f"{name_of(function)} {self.kind}: {lines[0]}{_missing(error, document)}")


def _missing(error: Exception, document: Document) -> str:
    """What to do about a column that a document does not have."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(name, str) or name in document:
        return ""
    return (
        f" (documents have the columns {', '.join(document)}; keep others of a source with "
        f"fields=Fields(columns=({name!r},)))"
    )


def _called(function: Callable[..., Any], document: Document) -> Any:
    own = {n: copy.deepcopy(v) if isinstance(v, list | dict) else v for n, v in document.items()}
    try:
        answer = function(own)
        return list(answer) if isinstance(answer, Iterator) else answer
    except (InputError, MemoryError, OSError):  # not of this document
        raise
    except Exception as error:
        raise _Failed(function, error, document) from error


def _made(function: Function, document: Document) -> list[Document] | str:
    (call,) = function.calls
    answer = _called(call, document)
    if isinstance(answer, str | Mapping):
        return [_changed(call, function, document, answer)]
    if not isinstance(answer, list | tuple):
        found = "nothing" if answer is None else f"{answer!r:.60}"
        raise TypeError(
            f"{name_of(call)} returned {found}; expected a text, a mapping of columns, or a list "
            "of these (an empty one drops the document)"
        )
    if not answer:
        return name_of(call)
    made = [_changed(call, function, document, each) for each in answer]
    for number, each in enumerate(made):
        if len(made) > 1 and each["id"] == document["id"]:
            each["id"] = f"{document['id']}/{number}"
    return made


def _decided(function: Function, document: Document) -> list[Document] | str:
    for call in function.calls:
        answer = _called(call, document)
        if isinstance(answer, np.bool_):
            answer = bool(answer)
        if answer is False or (isinstance(answer, str) and answer):
            return answer or name_of(call)
        if isinstance(answer, Mapping):
            document = _changed(call, function, document, answer)
        elif answer is not True:
            found = "nothing" if answer is None else f"{answer!r:.60}"
            raise TypeError(
                f"{name_of(call)} returned {found}; expected True to keep the document, False or a "
                "reason to drop it, or a mapping of columns to change it"
            )
    return [document]


def _changed(call: Any, function: Function, document: Document, answer: Any) -> Document:
    """A document with the columns that a function returned, or with its text."""
    if isinstance(answer, str):
        answer = {"text": answer}
    if not isinstance(answer, Mapping):
        raise TypeError(f"{name_of(call)} returned {answer!r:.60} in a list; expected documents")
    known = {*document, *(name for name, _ in function.columns)}
    if unknown := [name for name in answer if name not in known]:
        raise TypeError(
            f"{name_of(call)} returned a column {unknown[0]!r}, which documents do not have; name "
            f"it with its type: columns=(({unknown[0]!r}, 'string'),)"
        )
    made = {**document, **answer}
    for name, kind in (("id", str), ("text", str), ("token_count", int)):
        if not isinstance(made[name], kind):
            raise TypeError(
                f"{name_of(call)} returned the {name} {made[name]!r:.60}; expected {kind.__name__}"
            )
    try:
        after = len(made["text"].encode())
    except UnicodeError:
        raise TypeError(
            f"{name_of(call)} returned a text with half a surrogate pair, which is no UTF-8"
        ) from None
    if made["text"] != document["text"] and made["token_count"] == document["token_count"]:
        before = len(document["text"].encode())
        made["token_count"] = _scaled(document["token_count"], before, after)
    if not 0 <= made["token_count"] <= most_tokens_of(after):
        raise TypeError(
            f"{name_of(call)} returned a token_count of {made['token_count']:,} for a text of "
            f"{after:,} bytes; leave it out"
        )
    return made


def _scaled(tokens: int, before: int, after: int) -> int:
    """The token count of a text, by its bytes before a change and after it."""
    return max(1, round(tokens * after / max(1, before)))


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _answer(call: Callable[..., Any], batch: pa.RecordBatch, place: _Where) -> Any:
    try:
        return call(batch)
    except (InputError, MemoryError, OSError):
        raise
    except Exception as error:
        raise InputError(
            f"{place(0)} and the {batch.num_rows - 1:,} after it: {name_of(call)} failed with "
            f"{type(error).__name__}: {error}; repair the function or the documents"
        ) from error


def _made_batch(
    function: Function, batch: pa.RecordBatch, schema: pa.Schema, place: _Where
) -> _Answer:
    (call,) = function.calls
    answer = _answer(call, batch, place)
    found = answer.schema.names if isinstance(answer, pa.RecordBatch | pa.Table) else None
    if found is None or sorted(found) != sorted(schema.names):
        raise InputError(
            f"{name_of(call)} returned {found or type(answer).__name__}; expected a "
            f"pyarrow.RecordBatch with the columns {', '.join(schema.names)}"
        )
    table = answer if isinstance(answer, pa.Table) else pa.Table.from_batches([answer])
    try:
        kept = table.select(schema.names).cast(schema).combine_chunks().to_batches()
    except (pa.ArrowException, ValueError) as error:
        raise InputError(
            f"{place(0)} and after it: {name_of(call)} returned columns of other types than "
            f"{_shown(schema)} ({error}); name them with columns="
        ) from error
    if any(table.column(name).null_count for name in COLUMNS):
        raise InputError(
            f"{place(0)} and after it: {name_of(call)} returned a null in one of "
            f"{', '.join(COLUMNS)}; leave the row out"
        )
    lost = np.isin(batch.column("id"), table.column("id"), invert=True)
    dropped = batch.filter(pa.array(lost))
    made = kept[0] if kept else pa.RecordBatch.from_pylist([], schema)
    return _counted(call, batch, made, place), {name_of(call): dropped}


def _counted(
    call: Any, batch: pa.RecordBatch, made: pa.RecordBatch, place: _Where
) -> pa.RecordBatch:
    """What a function made of a batch, with each `token_count` as `_changed` has it."""
    ids, own = batch.column("id").to_pylist(), made.column("id").to_pylist()
    if ids == own:
        pairs = [(row, row) for row in range(len(ids))]
    else:  # of an id that is there twice, it is not known which row was changed
        times, rows = Counter(ids), {id: row for row, id in enumerate(ids)}
        pairs = [(rows[id], row) for row, id in enumerate(own) if times[id] == 1]
    names = ("text", "token_count")
    (texts, counts), (new, after) = ([b.column(n) for n in names] for b in (batch, made))
    tokens = after.to_pylist()
    for old, row in pairs:
        # Values of Arrow are compared without being made into Python's.
        if counts[old] == after[row] and texts[old] != new[row]:
            before, size = (len(text.as_buffer()) for text in (texts[old], new[row]))
            tokens[row] = _scaled(tokens[row], before, size)
    index = made.schema.get_field_index("token_count")
    made = made.set_column(index, made.schema.field(index), pa.array(tokens, pa.int64()))
    if wrong := impossible_counts(made, 0):
        row = min(wrong)
        raise InputError(
            f"{place(0)} and after it: {name_of(call)} returned id {own[row]!r}: {wrong[row]}, or "
            "leave the column as it is"
        )
    return made


def _decided_batch(
    function: Function, batch: pa.RecordBatch, schema: pa.Schema, place: _Where
) -> _Answer:
    del schema
    reasons: list[str | None] = [None] * batch.num_rows
    for call in function.calls:
        answer = _answer(call, batch, place)
        values = answer.to_pylist() if hasattr(answer, "to_pylist") else answer
        if isinstance(values, np.ndarray):
            values = values.tolist()
        known = (bool, str, type(None))
        if not isinstance(values, list) or not all(isinstance(v, known) for v in values):
            raise InputError(
                f"{place(0)} and after it: {name_of(call)} returned {values!r:.60}; expected a "
                "list or an array of booleans, or of reasons and None"
            )
        if len(values) != batch.num_rows:
            raise InputError(
                f"{place(0)} and after it: {name_of(call)} returned {len(values)} answers for "
                f"{batch.num_rows} documents; return one each"
            )
        booleans = getattr(answer, "type", None) == pa.bool_()
        if None in values and (booleans or any(isinstance(v, bool) for v in values)):
            raise InputError(
                f"{place(values.index(None))}: {name_of(call)} returned a null among booleans; "
                "expected True or False for each document, or reasons and None"
            )
        for row, value in enumerate(values):
            if value is False or value:
                reason = name_of(call) if value is False else value
                reasons[row] = reasons[row] or (None if reason is True else reason)
    rows: dict[str | None, list[int]] = defaultdict(list)
    for row, reason in enumerate(reasons):
        rows[reason].append(row)
    parts = {r: batch.take(pa.array(some, pa.int64())) for r, some in rows.items()}
    kept = parts.pop(None, batch.slice(0, 0))
    return kept, {str(reason): part for reason, part in parts.items()}
