"""What tells a permutation from a random one: p-values, and what batches of it look like.

Every p-value is one of a contingency table whose margins are fixed (a permutation's always are):
for a uniformly random permutation of m elements, chi-squared times (m - 1) / m has mean
(rows - 1)(columns - 1) exactly and the chi-squared distribution of so many degrees in the limit;
tables are kept coarse enough (10 or more expected in a cell on average) for that limit to hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import special, stats

Permutation = Callable[[np.ndarray], np.ndarray]

SAMPLE = 1 << 16  # positions looked at where there are too many to list
LISTED = 1 << 18  # up to this size all are looked at
_CELLS = 32


def contingency(rows, columns):
    """P-value of independence of two arrays of small integers, given how often each value is."""
    rows, row_counts = np.unique(rows, return_inverse=True, return_counts=True)[1:]
    columns, column_counts = np.unique(columns, return_inverse=True, return_counts=True)[1:]
    shape = len(row_counts), len(column_counts)
    table = np.bincount(rows * shape[1] + columns, minlength=shape[0] * shape[1]).reshape(shape)
    total = len(rows)
    expected = np.outer(row_counts, column_counts / total)
    chi = ((table - expected) ** 2 / expected).sum() * (total - 1) / total
    return float(stats.chi2.sf(chi, (shape[0] - 1) * (shape[1] - 1)))


def battery(permutation: Permutation, size: int, seed: int = 0) -> dict[str, float]:
    """P-values by name, for sizes of 500 and more; uniform in [0, 1] if it passes for random."""
    lags = {"1": 1, "64": 64, "root": math.isqrt(size - 1) + 1}
    if size <= LISTED:
        positions = np.arange(size)
    else:
        drawn = np.random.default_rng(seed).integers(0, size - max(lags.values()), SAMPLE)
        positions = np.unique(drawn)
    values = permutation(positions)
    cells = max(2, min(_CELLS, math.isqrt(len(positions) // 10)))
    width = -(-size // cells)
    half = 1 << -(-(size - 1).bit_length() // 2)
    root = lags["root"]
    found = {
        "positions": contingency(positions // width, values // width),
        "low_bits": contingency(positions % cells, values % cells),
        "low_to_high": contingency(positions % cells, values // width),
        "high_to_low": contingency(positions // width, values % cells),
        "both_halves": contingency(positions % 4 * 4 + positions // half % 4, values % 4),
        "both_roots": contingency(positions % root % 4 * 4 + positions // root % 4, values % 4),
        "parities": contingency(_parity(positions), _parity(values)),
        "bits": _bits(positions, values, (size - 1).bit_length()),
        "batch_parity": contingency(np.arange(len(values)) // 128, values & 1),
    }
    if size > LISTED:
        bounds = np.minimum(np.arange(cells + 1) * width, size)
        share = np.diff(bounds) / size * len(values)
        found["values"] = float(stats.chisquare(np.bincount(values // width), share).pvalue)
    for name, lag in lags.items():
        # Pairs do not overlap, so that the second values are matched with the first at random.
        apart = (positions // lag % 2 == 0) & (positions < size - lag)
        first, second = values[apart], permutation(positions[apart] + lag)
        cells = max(2, min(_CELLS, math.isqrt(len(first) // 10)))
        wide = -(-size // cells)
        found[f"pairs_{name}"] = contingency(first // wide, second // wide)
        found[f"pairs_{name}_low"] = contingency(first % cells, second % cells)
    return found


def tiny(permute: Callable[[int], Permutation], size: int, keys: int) -> float:
    """P-value of all size! permutations being equally likely over keys 0, 1, 2 ...; small sizes."""
    images = np.stack([permute(key)(np.arange(size)) for key in range(keys)])
    codes = np.unique(images @ size ** np.arange(size), return_counts=True)[1]
    counts = np.zeros(math.factorial(size))
    counts[: len(codes)] = codes
    return float(stats.chisquare(counts).pvalue)


def offsets_and_parity(values: np.ndarray, batch: int, block: int) -> tuple[float, float]:
    """(mean distinct offsets in blocks per batch, deviation of the batches' share of odd)."""
    batches = values[: len(values) // batch * batch].reshape(-1, batch)
    offsets = np.sort(batches % block, axis=1)
    distinct = (np.diff(offsets, axis=1) != 0).sum(1) + 1
    return float(distinct.mean()), float((batches & 1).mean(1).std())


def offsets_of_random(size: int, batch: int, block: int) -> tuple[float, float]:
    """Exact mean and deviation of the distinct offsets in a batch of a random permutation."""
    having = np.bincount(np.arange(size) % block, minlength=block)

    def missing(count: np.ndarray) -> np.ndarray:
        """Chance that a batch has none of so many elements."""
        return np.exp(_log_choose(size - count, batch) - _log_choose(size, batch))

    one = missing(having)
    both = missing(having[:, None] + having[None, :])
    np.fill_diagonal(both, one)
    return float(block - one.sum()), float(np.sqrt(both.sum() - one.sum() ** 2))


def shallow_feistel(size: int, seed: int) -> Permutation:
    """The Feistel network that mixes no high bits down: five rounds of multiply, add and mask.

    Halves of the next power of two, F(right) = right * 2654435761 + key (modulo the half), the
    halves exchanged after each round, values outside sent round again. Levanter's formula.
    """
    bits = (size - 1).bit_length()
    right_bits = bits - bits // 2
    mask = (1 << right_bits) - 1
    keys = np.random.default_rng(seed).integers(0, 1 << right_bits, 5)

    def once(values: np.ndarray) -> np.ndarray:
        left, right = values >> right_bits, values & mask
        for key in keys:
            left, right = right, left ^ ((right * 2654435761 + key) & mask)
        return left << right_bits | right

    def permutation(positions: np.ndarray) -> np.ndarray:
        values = once(np.asarray(positions, np.int64))
        while (values >= size).any():
            values = np.where(values >= size, once(values), values)
        return values

    return permutation


def _bits(positions: np.ndarray, values: np.ndarray, bits: int) -> float:
    """P-value of the strongest correlation of any bit of a value with any of its position."""
    one, other = (
        np.stack([array >> bit & 1 for bit in range(bits)]).astype(np.float64)
        for array in (positions, values)
    )
    varied = (one.std(1) > 0) & (other.std(1) > 0)  # 2^k + 1 positions: the highest bit hardly is
    one, other = one[varied], other[varied]
    one, other = ((x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True) for x in (one, other))
    squared = (one @ other.T / len(positions)) ** 2 * (len(positions) - 1)
    # Sidak: tables of different pairs of bits are independent.
    return float(-np.expm1(len(squared) ** 2 * np.log1p(-stats.chi2.sf(squared.max(), 1))))


def _parity(values: np.ndarray) -> np.ndarray:
    return np.bitwise_count(values) & 1


def _log_choose(n: np.ndarray | int, k: int) -> np.ndarray:
    return special.gammaln(n + 1) - special.gammaln(k + 1) - special.gammaln(n - k + 1)
