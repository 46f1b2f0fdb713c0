"""The order passes for random wherever a weak permutation is known to fail.

P-values of a sound permutation are uniform in [0, 1]. Each must lie inside [BOUND, 1 - BOUND]: with
the 700 or so that this file looks at, a sound one would be refused with a chance of 0.0014, once,
since seeds are fixed. A permutation whose low bits depend on low bits alone fails by hundreds of
orders of magnitude, which is tested too.
"""

import math

import numpy as np
import pytest

from data.batches.block_shuffle import BlockShuffle
from data.batches.feistel import FeistelPermutation, derive_key
from tests.data.batches.shuffle_statistics import (
    battery,
    contingency,
    offsets_and_parity,
    offsets_of_random,
    shallow_feistel,
    tiny,
)

BOUND = 1e-6
LARGE = [
    *[997, 1023, 1024, 1025, 60_000, 65_521, 65_535, 65_536, 65_537, 131_071, 131_072, 131_073],
    *[10**12, 10**12 + 39, 2**40 - 1, 2**40 + 1],
]
TABLE = [(65_536, 64, 1024, 128), (60_000, 64, 1024, 128), (131_072, 256, 512, 256)]


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
@pytest.mark.parametrize("size", [2, 3, 4, 5])
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


@pytest.mark.parametrize(("sequences", "block", "window", "batch"), TABLE)
def test_batches_hold_random_offsets_and_parities(sequences, block, window, batch):
    """Distinct offsets in blocks per batch within five deviations of the exact mean; odd and even.

    The exact means are 55.49, 55.49 and 162.10, and a batch's share of odd rows deviates by 0.044,
    0.044 and 0.031. The weak network has 9 to 21 and 121 offsets, and parities of 0.50, 0.46, 0.29.
    """
    batches = sequences // batch
    mean, deviation = offsets_of_random(sequences, batch, block)
    for seed in range(3):
        rows = shuffle(sequences, block, window, seed).rows(np.arange(sequences))
        offsets, parity = offsets_and_parity(rows, batch, block)
        assert abs(offsets - mean) < 5 * deviation / math.sqrt(batches)
        assert parity == pytest.approx(0.5 / math.sqrt(batch), rel=5 / math.sqrt(2 * batches))
        assert plausible(
            contingency(np.arange(batches * batch) // batch, rows[: batches * batch] & 1)
        )
    weak_offsets, weak_parity = offsets_and_parity(
        shallow_feistel(sequences, 0)(np.arange(sequences)), batch, block
    )
    assert weak_offsets < mean - 20 * deviation / math.sqrt(batches)
    assert weak_parity > 0.25


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
