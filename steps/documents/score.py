"""Adds a score to documents: a number by a function of the user's, or by a classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from data.read.unit import Fields
from pipeline import InputError, Result, StepContext, step
from pipeline.graph.step import Node
from pipeline.store.shards import Shard
from steps.artifacts import Documents
from steps.documents.classifier import Classifier
from steps.documents.facts import source_license
from steps.documents.items import DocumentSource, document_items
from steps.documents.result import documents_result
from steps.gang import HUB

Call = Callable[..., Any]
_BINS = tuple(index / 20 for index in range(21))


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
    from data.prepare.scores import ScoreWork, score_shard

    del version
    scorer = by.load() if isinstance(by, Classifier) else by
    items = document_items(documents, fields).items()
    work = {name: ScoreWork(item, scorer, column, bins, skip_failed) for name, item in items}
    written = run.map(score_shard, work)
    result = documents_result(run, written, documents)
    counted = _histogram(written.values(), bins)
    line = (
        f"{column}: {counted['mean']:.3f} on average, {counted['min']:.3f} to {counted['max']:.3f}"
    )
    headline = [*result["headline"], line]
    return {**result, "scores": {"column": column, **counted}, "headline": headline}


def _histogram(written: Iterable[Shard], bins: tuple[float, ...]) -> dict[str, Any]:
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
