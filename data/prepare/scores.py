"""Writes documents with a score each: a number by a user's function, or by a classifier."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data.prepare.apply import Function, map_shard, name_of
from data.prepare.classifier import TextClassifier
from data.prepare.items import DocumentItem
from data.read.parquet_table import read_table
from pipeline.store import storage


class ScoreWork(NamedTuple):
    """What a task does: `by` scores, and the histogram has `bins` as edges."""

    item: DocumentItem
    by: Callable[..., Any] | TextClassifier
    column: str
    bins: tuple[float, ...]
    skip_failed: bool


def score_shard(directory: str, work: ScoreWork) -> dict[str, Any]:
    """Shard writer: the item's documents with scores; the result has the histogram of these."""
    column, by = work.column, work.by
    if batched := isinstance(by, TextClassifier):
        call: Any = _Classified(by, column)
    else:
        call = _Scored(by, column)
    function = Function((call,), ((column, "float64"),), batched, work.skip_failed)
    result = map_shard(directory, (work.item, function))
    found = [
        batch.column(column).to_numpy()
        for split in result["splits"]
        for batch in read_table(storage.join(directory, f"{split}.parquet"), [column])
    ]
    values = np.concatenate([np.zeros(0), *found])
    scores = {
        "documents": len(values),
        "counts": np.histogram(values, np.array(work.bins))[0].tolist(),
        "below": int((values < work.bins[0]).sum()),
        "above": int((values > work.bins[-1]).sum()),
    }
    if len(values):
        least, most, total = map(float, (values.min(), values.max(), values.sum()))
        scores |= {"min": least, "max": most, "sum": total}
    return {**result, "scores": scores}


class _Scored:
    """Calls a user's function, and has its name in messages."""

    def __init__(self, by: Callable[..., Any], column: str) -> None:
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
        scores = pa.array(self.by.score(batch.column("text")), pa.float64())
        index = batch.schema.get_field_index(self.column)
        if index < 0:
            return batch.append_column(self.column, scores)
        return batch.set_column(index, pa.field(self.column, pa.float64()), scores)
