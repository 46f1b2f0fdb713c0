"""The simulation of preemptions beside a closed form, a walk of single events, and Young's rule."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.cost.preemption import Preemptions, Work, best_every, simulate

WORK = Work(steps=20_000, step=(1.0, 1.0, 1.0), save=10.0, start=120.0, restart=120.0)


def exponential(hours: float, wait: float = 0.0) -> Preemptions:
    return Preemptions(seconds=(3600 * hours,), wait=wait)


@pytest.mark.parametrize("hours", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("every", [100, 1000])
def test_the_mean_is_dalys_expectation(hours, every):
    """J. T. Daly, 2006, equation 13, with the first start before the first segment."""
    found = simulate(WORK, exponential(hours, wait=500.0), [every], 40_000)
    mean, segment, count = 3600 * hours, every + WORK.save, WORK.steps // every
    again = mean * math.exp(WORK.restart / mean)
    expected = again * math.expm1(segment / mean) * count
    # The first segment has a start before it, which the formula of a running machine has not.
    first = mean * math.expm1((WORK.start + segment) / mean)
    expected += first - again * math.expm1(segment / mean)
    error = found.held.std() / len(found.held[0]) ** 0.5
    assert abs(found.held.mean() - expected) < 4 * error
    waits = found.total - found.held
    assert waits.mean() == pytest.approx(500 * found.preemptions.mean(), rel=0.05)


def walked(work: Work, every: int, between: list[float]) -> tuple[float, int]:
    """Seconds held and preemptions, second by second of one run whose intervals are given."""
    held, saved, step = 0.0, 0, work.step[1]
    for index, until in enumerate(itertools.chain(between, itertools.repeat(math.inf))):
        clock, done = work.restart if index else work.start, saved
        while done < work.steps and clock <= until:
            clock, done = clock + step, done + 1
            if done % every == 0 or done == work.steps:
                clock += work.save
                if clock <= until:
                    saved = done
        if saved == work.steps:
            return held + clock, index
        held += until
    raise AssertionError


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 70),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(0, 9),
    st.lists(st.integers(1, 60), min_size=2, max_size=4),
)
def test_each_trial_is_a_walk_of_single_steps(steps, every, save, start, restart, samples):
    """With the intervals that the generator draws, of samples; numbers are exact in binary."""
    work = Work(steps=steps, step=(0.5, 0.5, 0.5), save=save, start=start, restart=restart)
    preemptions = Preemptions(seconds=tuple(float(s) + 0.25 for s in samples), wait=2.0)
    found = simulate(work, preemptions, [every], 3, seed=7)
    draws = np.random.default_rng(7)
    draws.standard_normal(3)
    drawn = np.empty((500, 3))
    for row in drawn:
        row[:] = draws.choice(np.asarray(preemptions.seconds), 3)
        draws.exponential(size=3)
    for trial in range(3):
        if math.isfinite(found.held[0, trial]):
            expected = walked(work, every, drawn[:, trial].tolist())
            assert (found.held[0, trial], found.preemptions[0, trial]) == expected
        else:
            longest = max(preemptions.seconds)
            assert (
                longest < restart + min(every, steps) * 0.5 + save or found.preemptions.max() > 99
            )


@pytest.mark.parametrize(("hours", "save"), [(1.0, 5.0), (8.0, 10.0), (24.0, 60.0)])
def test_the_best_interval_is_youngs(hours, save):
    """Within a third of sqrt(2 * save * mean), where the curve is flat, and no dearer than it."""
    work = Work(steps=40_000, step=(1.0, 1.0, 1.0), save=save, start=60.0, restart=60.0)
    young = math.sqrt(2 * save * 3600 * hours)
    best = best_every(work, exponential(hours))
    assert young / 1.34 < best < young * 1.34
    held = simulate(work, exponential(hours), [best, round(young), round(young / 8)], 20_000).held
    found, rule, often = held.mean(axis=1)
    assert found < 1.003 * rule
    assert found < often


def test_machines_that_stay_take_what_the_parts_add_up_to():
    """Then a trial is one attempt, and the median step gives `alone`."""
    never = Preemptions(seconds=(math.inf,), wait=9.0)
    found = simulate(WORK, never, [1000, 7000], 5)
    assert found.held.tolist() == [[WORK.alone(1000)] * 5, [WORK.alone(7000)] * 5]
    assert WORK.alone(7000) == 120 + 20_000 + 3 * 10
    assert found.total.tolist() == found.held.tolist()


def test_a_step_has_the_percentiles_that_are_given():
    """Between the logarithms of them it is normal, on either side."""
    work = Work(steps=1, step=(0.8, 1.0, 2.5), save=0.0, start=0.0, restart=0.0)
    never = Preemptions(seconds=(math.inf,), wait=0.0)
    found = simulate(work, never, [1], 40_000).held[0]
    assert np.quantile(found, (0.1, 0.5, 0.9)) == pytest.approx(work.step, rel=0.02)


def test_what_never_ends_is_infinite_and_trials_are_the_same_each_time():
    """A segment longer than machines stay is never saved; a shorter one is."""
    hopeless = Preemptions(seconds=(500.0, 600.0), wait=1.0)
    found = simulate(WORK, hopeless, [1000, 100], 50)
    assert np.isinf(found.held[0]).all()
    assert np.isfinite(found.held[1]).all()
    again = simulate(WORK, hopeless, [1000, 100], 50)
    assert np.array_equal(found.total, again.total)
    other = simulate(WORK, hopeless, [1000, 100], 50, seed=1)
    assert not np.array_equal(found.total[1], other.total[1])
