"""A mixture deals every position one source, close to its weight, without repeats or gaps."""

import collections
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches.mixture import BLOCK, Mixture, MixturePhase, floor_sum
from pipeline.errors import InputError


def mixture(*weights, seed=0, starts=(0, 5000, 5001, 12_000)):
    phases = [MixturePhase(start=s, weights=w) for s, w in zip(starts, weights, strict=False)]
    return Mixture(phases, seed)


@st.composite
def mixtures(draw):
    sources = draw(st.integers(1, 5))
    weight = st.floats(0, 10) | st.sampled_from([0, 1, 1e-6, 1e-300, 1e300, 1 / 3])
    weights = st.lists(weight, min_size=sources, max_size=sources).filter(any)
    gaps = draw(st.lists(st.integers(1, 3 * BLOCK), max_size=3))
    phases = [
        MixturePhase(start=int(start), weights=tuple(draw(weights)))
        for start in np.cumsum([0, *gaps])
    ]
    return Mixture(phases, draw(st.integers(-3, 3))), phases


@settings(max_examples=25, deadline=None)
@given(made=mixtures(), extra=st.integers(1, 2 * BLOCK))
def test_indices_count_each_source_from_zero(made, extra):
    """Counted position by position, every index is the number of earlier uses of its source."""
    mix, phases = made
    end = phases[-1].start + extra
    sources, indices = mix.choose(np.arange(end))
    assert sources.dtype == indices.dtype == np.int64
    seen = collections.Counter()
    for source, index in zip(sources.tolist(), indices.tolist(), strict=True):
        assert index == seen[source]
        seen[source] += 1
    for count in (0, 1, end // 2, phases[-1].start, end):
        counted = np.bincount(sources[:count], minlength=len(phases[0].weights))
        assert mix.drawn(count).tolist() == counted.tolist()


@settings(max_examples=25, deadline=None)
@given(made=mixtures(), blocks=st.integers(1, 4))
def test_blocks_hold_the_floor_or_ceiling_of_each_share(made, blocks):
    """In every block of every phase, each source gets its exact share, rounded down or up."""
    mix, phases = made
    ends = [phase.start for phase in phases[1:]] + [phases[-1].start + blocks * BLOCK]
    sources, _ = mix.choose(np.arange(ends[-1]))
    for phase, end in zip(phases, ends, strict=True):
        total = sum(map(Fraction, phase.weights))
        for begin in range(phase.start, end - BLOCK + 1, BLOCK):
            counts = np.bincount(sources[begin : begin + BLOCK], minlength=len(phase.weights))
            for count, weight in zip(counts.tolist(), phase.weights, strict=True):
                share = Fraction(weight) / total * BLOCK
                assert math.floor(share) <= count <= math.ceil(share)


@settings(max_examples=25, deadline=None)
@given(made=mixtures(), data=st.data())
def test_a_position_does_not_depend_on_the_others(made, data):
    """Positions asked in any order get what the whole sequence has there."""
    mix, phases = made
    end = phases[-1].start + BLOCK + 7
    whole = np.stack(mix.choose(np.arange(end)))
    chosen = np.array(data.draw(st.lists(st.integers(0, end - 1), max_size=30)), np.int64)
    assert np.array_equal(np.stack(mix.choose(chosen)), whole[:, chosen])


@pytest.mark.parametrize("rare", [1 / BLOCK, 1e-6])
def test_counts_stay_near_weights_however_small(rare):
    """Before each of 500 blocks, each source is within four positions of its exact weight."""
    mix = mixture((0.7, rare, 0.3 - rare))
    blocks = np.arange(500)
    sources, indices = mix.choose(np.arange(500 * BLOCK))
    total = sum(map(Fraction, (0.7, rare, 0.3 - rare)))
    for source, weight in enumerate((0.7, rare, 0.3 - rare)):
        before = np.concatenate([[0], np.cumsum((sources == source).reshape(500, -1).sum(1))])
        exact = blocks * BLOCK * float(Fraction(weight) / total)
        assert np.abs(before[:-1] - exact).max() < 4
        assert np.array_equal(indices[sources == source], np.arange(before[-1]))


@pytest.mark.parametrize("far", [10**6, 10**10, 10**13])
def test_far_positions_continue_the_count(far):
    """At 10^10 and beyond, indices follow on without gaps and lie near weight x position."""
    weights = (0.5, 0.2, 0.0, 0.3 - 1e-5, 1e-5)
    mix = mixture(weights)
    begin = far // BLOCK * BLOCK
    sources, indices = mix.choose(np.arange(begin, begin + 300 * BLOCK))
    for source, weight in enumerate(weights):
        mine = indices[sources == source]
        assert np.array_equal(np.diff(mine), np.ones(max(len(mine) - 1, 0)))
        if weight:
            share = Fraction(weight) / sum(map(Fraction, weights)) * begin
            assert abs(int(mine[0]) - share) < 8


def test_later_phases_leave_earlier_positions_alone():
    """The first phase is dealt the same whatever follows; the second continues the count."""
    alone, followed = mixture((2, 1)), mixture((2, 1), (0, 1))
    first = np.arange(5000)
    assert np.array_equal(alone.choose(first), followed.choose(first))
    sources, indices = followed.choose(np.arange(5000, 9000))
    used = int((alone.choose(first)[0] == 1).sum())
    assert sources.tolist() == [1] * 4000
    assert np.array_equal(indices, used + np.arange(4000))


def test_seeds_differ_and_the_choice_is_frozen():
    """Two seeds deal differently; recorded runs can be repeated: these may never change."""
    positions = np.array([0, 1, 2, 3, 4999, 5000, 12_000, 10**10])
    found = mixture((3, 2, 1), (1, 1, 1), seed=7).choose(positions)
    assert np.array_equal(found, FROZEN)
    many = np.arange(3 * BLOCK)
    one, two = (mixture((3, 2, 1), seed=seed).choose(many)[0] for seed in (0, 1))
    assert 0.3 < (one == two).mean() < 0.5


FROZEN = [[0, 0, 0, 1, 0, 0, 1, 2], [0, 1, 2, 0, 2496, 2497, 3995, 3333332495]]


@settings(max_examples=200, deadline=None)
@given(
    count=st.integers(0, 50),
    modulus=st.integers(1, 40),
    step=st.integers(0, 100),
    start=st.integers(0, 100),
)
def test_floor_sum_is_the_sum_of_floors(count, modulus, step, start):
    """Euclid's way agrees with adding them up."""
    summed = sum((start + i * step) // modulus for i in range(count))
    assert floor_sum(count, modulus, step, start) == summed


@pytest.mark.parametrize(
    "weights", [(), (0.0, 0), (-1.0, 2.0), (math.nan, 1.0), (math.inf, 1.0)], ids=str
)
def test_bad_weights_are_refused(weights):
    """The message names the field and shows the weights."""
    with pytest.raises(InputError, match=r"MixturePhase\.weights"):
        MixturePhase(start=0, weights=weights)


def test_bad_phases_are_refused():
    """Starts ascend, and no position is negative."""
    one = MixturePhase(start=0, weights=(1, 1))
    with pytest.raises(InputError, match=r"MixturePhase\.start=-1"):
        MixturePhase(start=-1, weights=(1,))
    with pytest.raises(InputError, match=r"phases\[1\]\.start=0: expected more than 0"):
        Mixture((one, one), 0)
    with pytest.raises(IndexError):
        Mixture((one,), 0).choose(np.array([3, -1]))


def test_no_positions_are_no_choices():
    """An empty request is answered."""
    assert [len(part) for part in mixture((1, 1)).choose(np.empty(0, np.int64))] == [0, 0]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), made=mixtures(), extra=st.integers(1, 2 * BLOCK))
def test_a_position_is_the_inverse_of_a_choice(data, made, extra):
    """Any position's source and index lead back to it, across phases and their short blocks."""
    mix, phases = made
    end = phases[-1].start + extra
    positions = data.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=20))
    chosen = zip(*(found.tolist() for found in mix.choose(np.array(positions))), strict=True)
    assert [mix.position(source, index) for source, index in chosen] == positions
