"""Assigns documents to splits by a hash of (seed, document id) alone.

A document's place is u = hash / 2^64, uniform in [0, 1). Train takes [0, p); the held-out splits
take ranges from the other end, in the order they are named: with budgets for validation and test,
[1 - v, 1) and [1 - v - t, 1 - v). So splits are disjoint, a larger train sample contains the
smaller one, and neither the order of files nor the number of workers matters.

A survey sums the token counts of 65,536 bins of the hash, which reads ids and counts but no text.
The documents of the few bins that can contain a boundary (`boundary_bins`) then give the exact one,
so that a split exceeds its budget by less than its last document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from data.select.hash_histogram import BINS, HashHistogram, bins_of
from data.select.token_budget import ALL_THAT_IS_LEFT, TRAIN, Budget
from data.select.token_ratio import TokenRatio
from pipeline.errors import InputError

HASHES = 1 << 64

_BIN_BITS = 48  # bits of the hash below those of the bin


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """(name, first hash, last hash) of every split; `thresholds` makes them disjoint."""

    splits: tuple[tuple[str, int, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.splits)


@dataclass(frozen=True, eq=False)
class BoundaryDocuments:
    """The documents of the bins that can contain a boundary."""

    bins: np.ndarray  # int64 [bins], ascending
    hashes: np.ndarray  # uint64 [documents], ascending
    counts: np.ndarray  # int64 [documents]: `token_count` of each

    @classmethod
    def of(cls, bins: np.ndarray, hashes: np.ndarray, counts: np.ndarray) -> BoundaryDocuments:
        """The boundary documents from documents in any order."""
        order = np.lexsort((counts, hashes))
        return cls(bins, hashes[order], counts[order])


def boundary_bins(survey: HashHistogram, budget: Budget, rate: TokenRatio | None) -> np.ndarray:
    """A held-out split begins where the one before it ends, at an unknown document of a bin. So its
    own boundary is between two bounds: the one without those documents, and the one with the bin's
    documents all in the split before.
    """
    known = rate or TokenRatio()
    predicted = known.predict(survey.tokens_by_bin, survey.documents_by_bin)
    downwards, upwards = np.cumsum(predicted[::-1]), np.cumsum(predicted)
    found: list[np.ndarray] = []
    least = most = 0.0  # lower and upper bound of the tokens in the splits so far
    for tokens in (tokens for _, tokens in budget.splits if tokens):
        first, last = np.searchsorted(downwards, [least + tokens, most + tokens])
        found.append(BINS - 1 - np.arange(first, min(last, BINS - 1) + 1))
        least, most = least + tokens, float(downwards[min(last, BINS - 1)])
    if budget.train != ALL_THAT_IS_LEFT:
        found.append(np.searchsorted(upwards, [budget.train]))
    bins = np.unique(np.concatenate(found or [np.empty(0, np.int64)]))
    return bins[(bins >= 0) & (bins < BINS)].astype(np.int64)


def thresholds(
    survey: HashHistogram,
    budget: Budget,
    rate: TokenRatio | None,
    edge: BoundaryDocuments,
) -> Ranges:
    """The hash range of every split, holding at least its budget of tokens.

    The excess is less than the split's last document, which is in `edge` (the documents of
    `boundary_bins`). A budget larger than the source is refused.
    """
    down = _Cuts(survey, rate or TokenRatio(), edge, downwards=True)
    up = _Cuts(survey, rate or TokenRatio(), edge, downwards=False)
    splits: list[tuple[str, int, int]] = []
    last, held = HASHES - 1, 0.0

    def refuse(name: str, asked: int) -> NoReturn:
        ends = at_the_ends(Ranges(splits=tuple(splits)), edge).items()
        cause = "".join(f"; {split}: {why}" for split, count in ends if (why := one_id(count)))
        message = too_much(name, budget, asked, down.total - held, down.total)
        raise InputError(f"{message}{cause}")

    # Held-out splits, each below the one before: from the end of the hash range downwards.
    for name, asked in budget.splits:
        if not asked:
            continue
        if asked > down.total - held or last < 0:
            refuse(name, asked)
        first, held = down.threshold_for(held + asked)
        splits.append((name, first, last))
        last = first - 1
    # Train: what they leave, or its own budget from the beginning upwards.
    left = down.total - held
    if budget.train == ALL_THAT_IS_LEFT:
        if left <= 0:
            refuse(TRAIN, 1)
        return Ranges(splits=((TRAIN, 0, last), *splits))
    if budget.train > left:
        refuse(TRAIN, budget.train)
    end, _ = up.threshold_for(budget.train)
    return Ranges(splits=((TRAIN, 0, min(end, last)), *splits))


def at_the_ends(ranges: Ranges, edge: BoundaryDocuments) -> dict[str, int]:
    ends = {name: last if name == TRAIN else first for name, first, last in ranges.splits}
    return {
        name: int(np.count_nonzero(edge.hashes == np.uint64(end))) for name, end in ends.items()
    }


def one_id(count: int) -> str:
    """What it means that `count` documents share a hash; empty if it is one document."""
    if count < 2:
        return ""
    return (
        f"{count:,} documents have its last id, and documents of one id are in one split; pass "
        "id=<name of a column whose values differ> (without ids, equal texts have one)"
    )


class _Cuts:
    """Finds where a running sum over the documents, from one end of the hash, reaches a target."""

    def __init__(
        self,
        survey: HashHistogram,
        rate: TokenRatio,
        edge: BoundaryDocuments,
        *,
        downwards: bool,
    ) -> None:
        step = -1 if downwards else 1
        self._rate, self._edge, self._step = rate, edge, step
        self._tokens = np.cumsum(survey.tokens_by_bin[::step])
        self._documents = np.cumsum(survey.documents_by_bin[::step])
        self._sums = rate.predict(self._tokens, self._documents)
        self.total = float(self._sums[-1])

    def threshold_for(self, target: float) -> tuple[int, float]:
        """(last hash needed, counted from the start of the sum, and the sum up to it)."""
        target = min(target, self.total)  # rounding may put it just above
        index = int(np.searchsorted(self._sums, target))
        place = index if self._step > 0 else BINS - 1 - index
        if place not in self._edge.bins:
            first = place << _BIN_BITS
            far = first if self._step < 0 else first + (1 << _BIN_BITS) - 1
            return far, float(self._sums[index])
        begin, end = np.searchsorted(bins_of(self._edge.hashes), [place, place + 1])
        hashes = self._edge.hashes[begin:end][:: self._step]
        tokens = np.cumsum(self._edge.counts[begin:end][:: self._step])
        if index:
            tokens += self._tokens[index - 1]
        documents = np.arange(1, len(hashes) + 1) + (self._documents[index - 1] if index else 0)
        sums = self._rate.predict(tokens, documents)
        needed = int(np.searchsorted(sums, target))
        # Documents with the same hash are in the same split.
        needed = int(np.flatnonzero(hashes == hashes[needed])[-1])
        return int(hashes[needed]), float(sums[needed])


def select(hashes: np.ndarray, ranges: Ranges) -> np.ndarray:
    """The index in `ranges.splits` of each document (int16), -1 for documents in no split."""
    splits = np.full(hashes.shape, -1, np.int16)
    for index, (_, first, last) in enumerate(ranges.splits):
        splits[(hashes >= np.uint64(first)) & (hashes <= np.uint64(last))] = index
    return splits


def too_much(name: str, budget: Budget, asked: int, available: float, total: float) -> str:
    """The error message for a split whose budget is larger than the source."""
    return (
        f"{name}: {asked:,} tokens asked, about {available:,.0f} available after the other splits "
        f"(the source holds about {total:,.0f}; budget: {budget}); ask for less or add documents"
    )
