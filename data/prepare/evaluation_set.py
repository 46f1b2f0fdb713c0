"""The texts of an evaluation set: from a file, or from tasks of lm-evaluation-harness."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.prepare.ngrams import Item
from data.read.byte_ranges import file_state, open_ranges
from data.read.formats import kind_of, open_stream
from data.read.listing import find_files
from data.read.parquet_table import TableWriter
from data.read.retry import redact
from data.read.unit import BATCH_ROWS
from pipeline.errors import InputError

_SCHEMA = pa.schema([("item", pa.int64()), ("text", pa.string())])
_ITEMS = 4096  # of one batch
_BLOCK = 4 << 20
_QUESTION = ("context", "choices")


def write_set(url: str, items: Iterable[Item]) -> dict[str, int]:
    """Write the texts of an evaluation set as Parquet; numbers of `items` and `texts`."""
    numbered = enumerate(items)
    count = texts = 0
    with TableWriter(url, _SCHEMA) as table:
        while part := list(itertools.islice(numbered, _ITEMS)):
            count += len(part)
            rows = [(item, text) for item, own in part for text in own if text.strip()]
            texts += len(rows)
            columns = zip(*rows, strict=True) if rows else ((), ())
            arrays = map(pa.array, columns, _SCHEMA.types)
            table.write(pa.record_batch(list(arrays), _SCHEMA))
    return {"items": count, "texts": texts}


def source_items(source: str, columns: Sequence[str] = ()) -> Iterator[Item]:
    """The texts of each row of a source's files.

    Args:
        source: files, folders, a pattern (see `data/source.py`) of Parquet, JSON lines, or text.
        columns: names whose texts are compared, each by itself; "a.b" is the key b of a mapping a.
            Without them a row is a question, `context` and `choices`, each choice of which
            continues the context; or it has a `text`. A row with none of them is refused.
    """
    for url, known in find_files(source):
        state = known or file_state(url)
        kind = kind_of(url, state)
        if kind == "parquet":
            with open_ranges(url, state) as raw, pq.ParquetFile(raw) as file:
                for batch in file.iter_batches(BATCH_ROWS):
                    yield from (_item(url, row, columns) for row in batch.to_pylist())
            continue
        if kind not in ("lines", "text"):
            raise InputError(
                f"{redact(url)}: expected Parquet, JSON lines or text, found {kind}; convert it"
            )
        with open_stream(url, state) as stream:
            content = b"".join(iter(lambda: stream.read(_BLOCK), b""))
        if kind == "text":
            yield [content.decode(errors="replace")]
        else:
            yield from (_item(url, row, columns) for row in _json_rows(url, content))


def _json_rows(url: str, content: bytes) -> Iterator[Any]:
    # Not `bytes.splitlines`: it takes other characters for line ends, too.
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            raise InputError(
                f"{redact(url)}, line {number}: expected JSON, found "
                f"{line[:80].decode(errors='replace')!r}; correct it"
            ) from error


def _item(url: str, row: Any, columns: Sequence[str]) -> Item:
    if not isinstance(row, Mapping):
        raise InputError(f"{redact(url)}: expected rows with columns, found {row!r:.80}")
    if not columns and all(name in row for name in _QUESTION):
        context, choices = (_texts(row[name]) for name in _QUESTION)
        return [" ".join([*context, choice]) for choice in choices or [""]]
    names = columns or ("text",)
    if not any(name in row or name.split(".")[0] in row for name in names):
        raise InputError(
            f"{redact(url)}: expected {' or '.join(names)}, found a row of {', '.join(row)}; pass "
            "columns=(...), the names of those with text"
        )
    return [text for name in names for text in _texts(_find(row, name))]


def _find(row: Any, name: str) -> Any:
    for key in [name] if name in row else name.split("."):
        row = row.get(key) if isinstance(row, Mapping) else None
    return row


def _texts(value: Any) -> Item:
    """All strings in a value, however deep."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value
    return [s for v in inner for s in _texts(v)] if isinstance(inner, Iterable) else []


def harness_items(
    tasks: Sequence[str], include_path: str | None = None
) -> dict[str, Iterator[Item]]:
    """The texts of each document of tasks of lm-evaluation-harness, by task; needs lm_eval.

    They are what a model is shown, the prompt with each answer, and the task's own fields in it,
    without the words of the prompt's template. The harness gets the documents from the hub unless a
    task's YAML in `include_path` names local files.
    """
    try:
        from lm_eval.tasks import TaskManager  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise InputError(
            "tasks of lm-evaluation-harness need the package lm_eval: install ponente[lm-eval]"
        ) from error
    try:
        found = TaskManager(include_path=include_path).load(list(tasks))["tasks"]
    except KeyError as error:
        raise InputError(f"lm_eval: no task {error}; see `lm_eval ls tasks`") from error
    return {
        name: (task_item(found[name], row) for row in found[name].eval_docs)
        for name in sorted(found)
    }


def task_item(task: Any, row: Mapping[str, Any]) -> Item:
    """The texts of one document of a task."""
    prompt = task.doc_to_text(row)
    choices = task.doc_to_choice(row) if task.config.doc_to_choice is not None else []
    if isinstance(prompt, str) and choices:
        shown = [f"{prompt} {choice}" for choice in choices]
    else:  # no choices, or an index of one that ends in the target
        answers = _texts(task.doc_to_target(row)) or [""]
        begins = [prompt] if isinstance(prompt, str) else [str(choice) for choice in choices]
        shown = [f"{begin} {answer}" for begin in begins for answer in answers]
    fields = dict.fromkeys(_texts(row))
    return [*shown, *(text for text in fields if text and any(text in s for s in shown))]
