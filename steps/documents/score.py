"""Adds a score to documents: a number by a function of the user's, or by a classifier."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from data.read.unit import Fields
from pipeline import InputError, Result, StepContext, step
from pipeline.graph.step import Node
from pipeline.store import storage
from pipeline.store.shards import Shard
from steps.artifacts import Documents
from steps.documents.classifier import Classifier
from steps.documents.items import DocumentSource, document_items
from steps.documents.licenses import source_license
from steps.documents.result import documents_result
from steps.gang import HUB

if TYPE_CHECKING:
    import pyarrow as pa

    from data.prepare.apply import Function
    from data.prepare.classifier import TextClassifier
    from data.prepare.items import DocumentItem

Call = Callable[..., Any]
_BINS = tuple(index / 20 for index in range(21))


class _Work(NamedTuple):
    """What a task does."""

    item: DocumentItem
    function: Function
    column: str
    bins: tuple[float, ...]


def _check(arguments: Mapping[str, Any]) -> None:
    by, column, bins = (arguments[name] for name in ("by", "column", "bins"))
    if isinstance(by, type) or not (callable(by) or isinstance(by, Node)):
        raise InputError(
            f"score_documents(by=...): expected a function or a classifier, found {by!r}; give "
            "steps.classifier(FILE) for one in a file"
        )
    if column in ("id", "text", "token_count") or not column:
        raise InputError(
            f"score_documents(column={column!r}): expected the name of a column for the scores; "
            'such as "score"'
        )
    if len(bins) < 2 or list(bins) != sorted(set(bins)):
        raise InputError(
            f"score_documents(bins={bins!r}): expected two or more ascending edges of a histogram"
        )


@step(output=Documents, version=1, cpus=0, check=_check, facts=source_license, environment=HUB)
def score_documents(
    run: StepContext,
    documents: DocumentSource,
    by: Call | Classifier,
    *,
    version: int = 1,
    column: str = "score",
    bins: tuple[float, ...] = _BINS,
    skip_failed: bool = False,
    fields: Fields = Fields(),
) -> Result:
    """Documents with a score each, a column of type float64, for `sample(min_score=)` or a filter.

    Args:
        documents: documents, or a source.
        by: a function that takes a document, a dict of its columns, and returns a number; or a
            classifier, whose score is the probability that a document is a good one.
        version: of the function; raise it when a change of its code changes the scores.
        column: name of the score's column.
        bins: ascending edges of the histogram of scores in the result; a bin has its lower edge,
            and the last one also its upper.
        skip_failed: drop and count documents with which the function raises an error.
        fields: names of a source's columns, and which others to keep.
    """
    from data.prepare.apply import Function

    del version
    columns = ((column, "float64"),)
    if isinstance(by, Classifier):
        function = Function((_Classified(by.load(), column),), columns, batched=True)
    else:
        function = Function((_Scored(by, column),), columns, skip_failed=skip_failed)
    items = document_items(documents, fields)
    work = {name: _Work(item, function, column, bins) for name, item in items.items()}
    written = run.map(score_shard, work)
    result = documents_result(run, written, documents)
    counted = _histogram(written.values(), bins)
    line = (
        f"{column}: {counted['mean']:.3f} on average, {counted['min']:.3f} to {counted['max']:.3f}"
    )
    headline = [*result["headline"], line]
    return {**result, "scores": {"column": column, **counted}, "headline": headline}


def _histogram(written: Iterable[Shard], bins: tuple[float, ...]) -> dict[str, Any]:
    """Of all documents: documents by bin, below the bins and above them, least, most and mean."""
    found = [shard.result["scores"] for shard in written if shard.result["scores"]["documents"]]
    documents = sum(one["documents"] for one in found)
    return {
        "bins": list(bins),
        "counts": [sum(column) for column in zip(*(one["counts"] for one in found), strict=True)],
        "below": sum(one["below"] for one in found),
        "above": sum(one["above"] for one in found),
        "min": min(one["min"] for one in found),
        "max": max(one["max"] for one in found),
        "mean": sum(one["sum"] for one in found) / documents,
    }


class _Scored:
    """Calls a user's function, and has its name in messages."""

    def __init__(self, by: Call, column: str) -> None:
        from data.prepare.apply import name_of

        self.by, self.column = by, column
        self.__qualname__ = name_of(by)

    def __call__(self, document: dict[str, Any]) -> dict[str, float]:
        value = self.by(document)
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            found = "nothing" if value is None else f"{value!r:.60}"
            raise TypeError(f"expected a finite number to be returned, found {found}")
        return {self.column: float(value)}


@dataclass(frozen=True)
class _Classified:
    """Scores a batch by a classifier."""

    by: TextClassifier
    column: str

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow as pa

        scores = pa.array(self.by.score(batch.column("text")), pa.float64())
        index = batch.schema.get_field_index(self.column)
        if index < 0:
            return batch.append_column(self.column, scores)
        return batch.set_column(index, pa.field(self.column, pa.float64()), scores)


def score_shard(directory: str, work: _Work) -> Mapping[str, Any]:
    """Shard writer: the item's documents with scores."""
    import numpy as np

    from data.prepare.apply import map_item
    from data.read.parquet_table import read_table

    result = map_item(directory, work.item, work.function)
    found = [
        batch.column(work.column).to_numpy()
        for split in result["splits"]
        for batch in read_table(storage.join(directory, f"{split}.parquet"), [work.column])
    ]
    values = np.concatenate([np.zeros(0), *found])
    counts, _ = np.histogram(values, np.array(work.bins))
    scores = {
        "documents": len(values),
        "counts": counts.tolist(),
        "below": int((values < work.bins[0]).sum()),
        "above": int((values > work.bins[-1]).sum()),
    }
    if len(values):
        scores |= {
            "min": float(values.min()),
            "max": float(values.max()),
            "sum": float(values.sum()),
        }
    return {**result, "scores": scores}
