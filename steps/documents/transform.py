"""Map and filter: documents through a function of the user's, on the workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from data.read.unit import Fields
from pipeline import InputError, Result, StepContext, step
from steps.artifacts import Documents
from steps.documents.facts import source_license
from steps.documents.items import DocumentSource, document_items
from steps.documents.result import documents_result
from steps.gang import HUB

Call = Callable[..., Any]


def _check(arguments: Mapping[str, Any]) -> None:
    import pyarrow as pa

    step, name = ("map_documents", "by") if "by" in arguments else ("filter_documents", "keep")
    calls = _calls(arguments[name]) if name == "keep" else (arguments[name],)
    wrong = [call for call in calls if not callable(call) or isinstance(call, type)]
    if wrong or not calls:
        raise InputError(
            f"{step}({name}=...): expected a function, found {wrong[0] if wrong else 'none'!r}; "
            "define one in the experiment's file, or import it"
        )
    if arguments["batched"] and arguments["skip_failed"]:
        raise InputError(
            f"{step}: skip_failed=True does not go with batched=True, where an error is not of one "
            "document; leave one of them out"
        )
    for column, kind in arguments["columns"]:
        try:
            pa.type_for_alias(kind)
        except ValueError:
            raise InputError(
                f"{step}(columns=...): {column!r} has the type {kind!r}; expected one of Arrow's, "
                'such as "string", "int64", "float64" or "bool"'
            ) from None


def _calls(given: Call | tuple[Call, ...]) -> tuple[Call, ...]:
    return given if isinstance(given, tuple) else (given,)


@step(output=Documents, version=2, cpus=0, check=_check, facts=source_license, environment=HUB)
def map_documents(
    run: StepContext,
    documents: DocumentSource,
    *,
    by: Call,
    version: int = 1,
    columns: tuple[tuple[str, str], ...] = (),
    batched: bool = False,
    skip_failed: bool = False,
    fields: Fields = Fields(),
) -> Result:
    """What a function makes of each document.

    Args:
        documents: documents, or a source.
        by: takes a document, a dict of its columns, and returns its new text, a dict of the columns
            that change, or a list or generator of these for several documents or none. Where the
            text changes, `token_count` changes with its bytes. `functools.partial` and frozen
            dataclasses with `__call__` give it arguments, which are part of the key.
        version: of the function; raise it when a change of its code changes the output.
        columns: (name, Arrow type) of the columns that the function adds.
        batched: the function takes and returns a `pyarrow.RecordBatch` of up to 1,024 documents. A
            row is what became of the document of its id; one of a new id needs a `token_count`.
        skip_failed: drop and count documents with which the function raises an error.
        fields: names of a source's columns, and which others to keep.

    Raises:
        InputError: the function fails with a document or returns something else, or no document
            is left.
    """
    from data.prepare.apply import Function, map_shard

    del version
    function = Function((by,), columns, batched, skip_failed)
    items = document_items(documents, fields)
    written = run.map(map_shard, {name: (item, function) for name, item in items.items()})
    return documents_result(run, written, documents)


@step(output=Documents, version=2, cpus=0, check=_check, facts=source_license, environment=HUB)
def filter_documents(
    run: StepContext,
    documents: DocumentSource,
    *,
    keep: Call | tuple[Call, ...],
    version: int = 1,
    columns: tuple[tuple[str, str], ...] = (),
    batched: bool = False,
    skip_failed: bool = False,
    fields: Fields = Fields(),
) -> Result:
    """The documents that a function keeps, with counts of the others by reason.

    Args:
        documents: documents, or a source.
        keep: takes a document, a dict of its columns, and returns True to keep it, False or a
            reason (str) to drop it, or a dict of columns to change. Several are asked in turn.
            `data.prepare.filters` has the field's own.
        version: of the functions; raise it when a change of their code changes the output.
        columns: (name, Arrow type) of the columns that the functions add.
        batched: the functions take a `pyarrow.RecordBatch` of up to 1,024 documents and return an
            answer for each: booleans without nulls, or reasons and None.
        skip_failed: drop and count documents with which a function raises an error.
        fields: names of a source's columns, and which others to keep.

    Raises:
        InputError: a function fails with a document or returns something else, or no document is
            left.
    """
    from data.prepare.apply import Function, filter_shard

    del version
    function = Function(_calls(keep), columns, batched, skip_failed)
    items = document_items(documents, fields)
    written = run.map(filter_shard, {name: (item, function) for name, item in items.items()})
    return documents_result(run, written, documents)
