"""The schedule against its definition in plain Python and against optax's own schedules."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.errors import InputError
from training.config import OptimizerConfig
from training.config.optimizer import SCHEDULES, count_of
from training.optimizer import schedule


def expected_rate(config, steps, s):
    """The rate of step s, straight from the definition."""
    peak, low = config.learning_rate, config.min_ratio * config.learning_rate
    warmup = round(config.warmup * steps) if config.warmup < 1 else int(config.warmup)
    if s < warmup:
        return peak * (s + 1) / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "inverse_sqrt":
        return max(low, peak * math.sqrt(max(warmup, 1) / (s + 1)))
    if config.schedule == "linear":
        return peak + (low - peak) * (s - warmup + 1) / (steps - warmup)
    if config.schedule == "cosine":
        p = (s - warmup + 1) / (steps - warmup)
        return low + (peak - low) * (1 + math.cos(math.pi * p)) / 2
    tail = round(config.decay * steps) if config.decay < 1 else int(config.decay)
    if s < steps - tail:
        return peak
    return peak + (low - peak) * (s - (steps - tail) + 1) / tail


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(
    ("steps", "warmup", "decay", "ratio"),
    [(100, 0.1, 0.2, 0.1), (37, 5, 0.3, 0.0), (10, 0, 4, 1.0), (7, 7, 0, 0.1), (1, 0, 0, 0.1)],
)
def test_schedule_is_the_formula_at_every_step(kind, steps, warmup, decay, ratio):
    """Every step's rate is that of the definition, to float32."""
    config = OptimizerConfig(
        learning_rate=3e-3, schedule=kind, warmup=warmup, decay=decay, min_ratio=ratio
    )
    got = jax.vmap(schedule(config, steps))(jnp.arange(steps))
    want = [expected_rate(config, steps, s) for s in range(steps)]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-9)


def test_warmup_and_tail_must_fit():
    """Warmup and decay longer than the run are refused."""
    with pytest.raises(InputError, match="do not fit"):
        schedule(OptimizerConfig(schedule="wsd", warmup=8, decay=5), 10)
    with pytest.raises(InputError, match="do not fit"):
        schedule(OptimizerConfig(warmup=11), 10)


PARTS = st.integers(0, 1000).flatmap(
    lambda n: st.tuples(st.just(n / 1000), st.integers(0, 1000 - n).map(lambda m: m / 1000))
)


@given(PARTS, st.integers(1, 10**6))
@example((0.5, 0.5), 3)
@example((0.3, 0.7), 45)
def test_fractions_that_sum_to_at_most_one_fit_every_run(parts, steps):
    """Each has its share to a step, and together they are no longer than the run."""
    warmup, decay = (min(part, 0.999) for part in parts)
    wsd = OptimizerConfig(schedule="wsd", warmup=warmup, decay=decay)
    found = wsd.phases(steps)
    assert sum(found) <= steps
    for count, part in zip(found, (wsd.warmup, wsd.decay), strict=True):
        assert abs(count - part * steps) <= 1.5


FRACTION = st.integers(0, 99).map(lambda n: n / 100)


@given(
    kind=st.sampled_from(SCHEDULES),
    warmup=FRACTION | st.integers(1, 20).map(float),
    decay=FRACTION,
    runs=st.lists(st.integers(21, 400), min_size=2, max_size=4, unique=True).map(sorted),
    data=st.data(),
)
@pytest.mark.slow
def test_an_extension_moves_nothing_into_the_steps_that_are_done(kind, warmup, decay, runs, data):
    """A run, an extension of it at a step k, an extension of that: below each k every schedule has
    the first run's warmup, and between warmup and k a rate that the run without its end has."""
    config = OptimizerConfig(schedule=kind, warmup=warmup, decay=decay, learning_rate=1.0)
    first, done = runs[0], 0
    rises = round(warmup * first if warmup < 1 else warmup)
    for steps in runs[1:]:
        done = data.draw(st.integers(done + 1, steps - 1))
        longer = config.continued(done, steps, first)
        found = np.asarray(jax.vmap(schedule(longer, steps))(jnp.arange(steps)))
        begun = np.arange(done)
        want = np.minimum((begun + 1) / max(rises, 1), 1.0)
        if kind == "inverse_sqrt":
            fall = np.sqrt(max(rises, 1) / np.maximum(begun + 1, max(rises, 1)))
            want *= np.maximum(fall, config.min_ratio)
        if kind in ("cosine", "linear"):  # their end is the longer run's: only the warmup is past
            found, want = found[:rises][:done], want[:rises]
        np.testing.assert_allclose(found[:done], want, rtol=2e-6)


def test_a_decay_in_steps_must_fit_into_what_is_left():
    """A number of steps is never cut: 5 steps from 96 to 100 are refused, a fraction is cut."""
    wsd = OptimizerConfig(schedule="wsd", warmup=0, decay=5)
    with pytest.raises(InputError, match="5 steps do not fit into the 4 steps that are left"):
        wsd.continued(96, 100, 50)
    assert dataclasses.replace(wsd, decay=0.05).continued(96, 100, 50).decay == 4.0


def test_count_of_reads_fractions_and_steps():
    """Below 1 is a fraction, 1 and above are steps."""
    assert [count_of(part, 200) for part in (0.0, 0.01, 0.5, 1, 7.0)] == [0, 2, 100, 1, 7]
