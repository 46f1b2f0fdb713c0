"""The order passes for random wherever a weak permutation is known to fail.

P-values of a sound permutation are uniform in [0, 1]. Each must lie inside [BOUND, 1 - BOUND]: with
the 300 or so that this file looks at, a sound one would be refused with a chance of 0.0006, once,
since seeds are fixed. A permutation whose low bits depend on low bits alone fails by hundreds of
orders of magnitude, which is tested too.

Every p-value is one of a contingency table whose margins are fixed (a permutation's always are):
for a uniformly random permutation of m elements, chi-squared times (m - 1) / m has mean
(rows - 1)(columns - 1) exactly and the chi-squared distribution of so many degrees in the limit;
tables are kept coarse enough (10 or more expected in a cell on average) for that limit to hold.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from data.batches.block_shuffle import BlockShuffle
from data.batches.feistel import FeistelPermutation, derive_key

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


BOUND = 1e-6
LARGE = [997, 1024, 60_000, 65_536, 65_537, 131_071, 10**12 + 39, 2**40 + 1]


def plausible(p_value):
    return BOUND <= p_value <= 1 - BOUND


def shuffle(sequences, io_block_size=64, window_blocks=1024, seed=0):
    return BlockShuffle(
        sequences=sequences, io_block_size=io_block_size, window_blocks=window_blocks, seed=seed
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", LARGE)
def test_permutations_pass_the_battery(size):
    """Positions, pairs at three distances, low bits, parities and bits, for two keys a size."""
    for key in range(2):
        found = battery(FeistelPermutation(size, derive_key(key)), size, key)
        assert all(map(plausible, found.values())), found


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5])
def test_tiny_permutations_are_equally_likely(size):
    """All permutations of 2 to 5 elements come equally often over keys; 1 element stays.

    Eight rounds are refused at 5 elements with these 7,200 keys.
    """
    keys = 60 * math.factorial(size)
    assert plausible(tiny(lambda key: FeistelPermutation(size, key), size, keys))
    assert FeistelPermutation(1, 5)(np.zeros(3, np.int64)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("size", [65_536, 60_000, 10**12])
def test_the_battery_refuses_low_bits_that_depend_on_low_bits(size):
    """Multiply, add and mask without a shift down: refused with p-values under 10^-100."""
    found = battery(shallow_feistel(size, 0), size)
    assert min(found.values()) < 1e-100


def test_epochs_and_neighbouring_seeds_are_unrelated():
    """Places of a row in epochs 0 and 1, and in seed s epoch 1 and seed s + 1 epoch 0."""
    size = 50_000
    places = {}
    for seed in range(3):
        rows = shuffle(size, 16, 128, seed).rows(np.arange(2 * size)).reshape(2, size)
        for epoch in range(2):
            places[seed, epoch] = np.argsort(rows[epoch])
    keys = sorted(places)
    for number, one in enumerate(keys):
        for other in keys[number + 1 :]:
            table = contingency(places[one] % 32, places[other] % 32)
            assert plausible(table), (one, other)
            # Agreements of two random orders are Poisson with mean 1: 14 or more has 10^-11.
            assert (places[one] == places[other]).sum() < 14, (one, other)
