"""Document lengths as exact counts: the number of documents of each length, mergeable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class Lengths:
    """Number of documents of each length.

    Nothing is binned, so mean and median are exact; FineWeb-edu has some 20,000 distinct lengths.

    Attributes:
        values: int64 [distinct], ascending: lengths in tokens of the source's own count.
        counts: int64 [distinct]: documents of that length.
    """

    values: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, lengths: np.ndarray) -> Lengths:
        """The lengths of some documents, int64 [documents]."""
        values, counts = np.unique(np.asarray(lengths, np.int64), return_counts=True)
        return cls(values, counts.astype(np.int64))

    @staticmethod
    def merged(parts: Iterable[Lengths]) -> Lengths:
        empty = np.empty(0, np.int64)
        waiting, size = [Lengths(empty, empty)], 0
        for part in parts:
            waiting.append(part)
            size += len(part.values)
            if size >= _AT_ONCE:  # bounds the memory of thousands of parts
                waiting = [_joined(waiting)]
                size = len(waiting[0].values)
        return _joined(waiting)

    @property
    def documents(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int(self.values @ self.counts)

    @property
    def mean(self) -> float:
        return self.tokens / self.documents if self.documents else 0.0

    @property
    def mean_standard_error(self) -> float:
        """Standard error of the mean of documents drawn at random; 0 for fewer than two."""
        if self.documents < 2:
            return 0.0
        squares = float(((self.values - self.mean) ** 2) @ self.counts)
        return math.sqrt(squares / (self.documents - 1) / self.documents)

    @property
    def median(self) -> float:
        """The middle length, or the mean of the two in the middle; 0 without documents."""
        if not self.documents:
            return 0.0
        ends = np.cumsum(self.counts)
        middle = np.array([(self.documents - 1) // 2, self.documents // 2])
        return float(self.values[np.searchsorted(ends, middle, side="right")].mean())

    def describe(self) -> dict[str, float]:
        """Mean, its standard error, and median, for a report."""
        return {
            "mean": self.mean,
            "mean_standard_error": self.mean_standard_error,
            "median": self.median,
        }


def _joined(parts: Sequence[Lengths]) -> Lengths:
    values, places = np.unique(np.concatenate([p.values for p in parts]), return_inverse=True)
    counts = np.zeros(len(values), np.int64)
    np.add.at(counts, places, np.concatenate([part.counts for part in parts]))
    return Lengths(values, counts)
