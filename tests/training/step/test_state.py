"""The average of the parameters, the loss-spike guard, and bad steps of every kind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training import tiny
from training.step.state import LEAST, WINDOW, ema_weight, is_spike, remember


def placed(program, tokens):
    return program.layout.place(tokens, tiny.BATCH)


LOSSES = st.integers(1, 100).map(lambda n: n / 8)


@pytest.mark.slow
@given(st.lists(LOSSES, max_size=90), st.integers(1, 600).map(lambda n: n / 8))
def test_a_spike_is_a_loss_far_above_the_median_of_the_last_ones(losses, loss):
    """NumPy's median of the last WINDOW losses decides, once LEAST of them are known."""
    recent = jnp.zeros(WINDOW)
    for value in losses:
        recent = remember(recent, jnp.float32(value))
    last = np.asarray(losses[-WINDOW:], np.float32)
    want = len(last) >= LEAST and np.float32(loss) > np.float32(3.0) * np.median(last)
    applied = jnp.int32(len(losses))
    assert bool(is_spike(recent, applied, jnp.float32(loss), 3.0)) == want


@pytest.mark.slow
def test_the_average_follows_the_applied_parameters():
    """NumPy's weighted mean of the parameters after every step, without those of the start; a
    step not applied leaves it alone."""
    program = tiny.program(ema=0.9)
    state, after = program.init(), []
    for seed in range(3):
        state, _ = program.step(state, placed(program, tiny.random_tokens(seed)))
        after.append([np.array(x, np.float64) for x in jax.tree.leaves(state.model)])
        weights = 0.9 ** np.arange(len(after))[::-1]
        for a, *models in zip(jax.tree.leaves(state.ema), *after, strict=True):
            want = np.average(models, axis=0, weights=weights)
            np.testing.assert_allclose(a, want, rtol=1e-5, atol=1e-7)
    before = jax.tree.map(np.array, state.ema)
    state = dataclasses.replace(state, model=_spoiled(state.model, np.nan))
    state, _ = program.step(state, placed(program, tiny.random_tokens(3)))
    assert tiny.equal(before, state.ema)
    assert state.eval_params is state.ema


@pytest.mark.slow
@pytest.mark.parametrize("bad", [4, 3])
def test_the_mean_of_the_last_steps_is_that_of_their_parameters(bad):
    """Up to the first of the last three steps the average is the model, then NumPy's mean of the
    applied ones. A step not applied is not in it: neither one in their middle, nor the first of
    them, of which the average held the parameters before."""
    program = tiny.program(average_last=0.5)
    state, last = program.init(), []
    for step in range(tiny.TRAIN.steps):
        model = _spoiled(state.model, np.nan) if step == bad else state.model
        given = jax.tree.map(jnp.copy, dataclasses.replace(state, model=model))
        new, _ = program.step(given, placed(program, tiny.random_tokens(step)))
        if step == bad:
            assert tiny.equal(new.ema, state.ema)
            state = dataclasses.replace(new, model=state.model)
            last = last if step > 3 else []
            continue
        state = new
        model = [np.array(x, np.float64) for x in jax.tree.leaves(state.model)]
        last = [*last, model] if step > 3 else [model]
        for a, *models in zip(jax.tree.leaves(state.ema), *last, strict=True):
            np.testing.assert_allclose(a, np.mean(models, axis=0), rtol=1e-5, atol=1e-7)
    assert (int(state.averaged), int(state.applied)) == (2, 5)
    assert state.eval_params is state.ema


@pytest.mark.slow
@pytest.mark.parametrize("done", [4, 6])
def test_a_run_that_is_continued_averages_its_own_last_steps(done):
    """Its last four steps begin after step 5. Continued at 6 of another run's six, whose mean is of
    three, that mean stands for the one step in both; continued before, it has no weight."""
    short, longer = tiny.program(average_last=3), tiny.program(average_last=4, steps=9)
    state = short.init()
    for step in range(done):
        state, _ = short.step(state, placed(short, tiny.random_tokens(step)))
    held = [np.array(x, np.float64) for x in jax.tree.leaves(state.ema)]
    models = [held] if done == 6 else []
    for step in range(done, 9):
        state, _ = longer.step(state, placed(longer, tiny.random_tokens(step)))
        if step >= 5:
            models.append([np.array(x, np.float64) for x in jax.tree.leaves(state.model)])
    for a, *each in zip(jax.tree.leaves(state.ema), *models, strict=True):
        np.testing.assert_allclose(a, np.mean(each, 0), rtol=1e-5, atol=1e-7)
    assert int(state.averaged) == 4


@pytest.mark.slow
def test_a_spike_is_skipped_and_counted_and_ordinary_steps_are_not():
    """After many batches of one token, a batch of random ones is not applied."""
    program = tiny.program(spike_guard=1.2)
    state, losses = program.init(), []
    common = np.full((tiny.BATCH, tiny.LENGTH), 5, np.int32)
    for _ in range(LEAST + 14):
        state, metrics = program.step(state, placed(program, common))
        losses.append(float(metrics["loss"]))
    assert int(state.skipped) == 0
    before = jax.tree.map(np.array, (state.model, state.optimizer_state, state.recent))
    state, metrics = program.step(state, placed(program, tiny.random_tokens(0)))
    assert float(metrics["loss"]) > 1.2 * np.median(losses)
    assert int(state.skipped) == 1
    assert tiny.equal(before, (state.model, state.optimizer_state, state.recent))
    state, metrics = program.step(state, placed(program, common))
    assert (int(state.skipped), int(state.step)) == (1, LEAST + 16)


def _spoiled(tree, value):
    """The first array of floats with `value` as its first number."""
    leaves, structure = jax.tree.flatten(tree)
    first = next(i for i, x in enumerate(leaves) if x.ndim and x.dtype == jnp.float32)
    leaves[first] = leaves[first].at[(0,) * leaves[first].ndim].set(value)
    return jax.tree.unflatten(structure, leaves)


@given(
    st.one_of(st.floats(1e-6, 0.999), st.sampled_from([0.9999, 0.999999])),
    st.integers(1, 2**31 - 1),
)
def test_the_newest_parameters_have_the_weight_of_the_bias_correction(decay, applied):
    """(1 - decay) / (1 - decay^t) in float64: 1 after the first step, 1 - decay after many."""
    want = (1.0 - decay) / -np.expm1(applied * np.log(decay))
    assert float(ema_weight(decay, jnp.int32(applied))) == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_a_batch_without_a_counted_token_changes_nothing_but_the_counts():
    """All masked: parameters (which decay would shrink), moments, EMA and window stay."""
    program, tokens = tiny.program(masked=True, spike_guard=3.0, ema=0.9), tiny.random_tokens(0)
    whole, none = (tiny.stored(tokens, np.full(tokens.shape, count)) for count in (1, 0))
    state, _ = program.step(program.init(), placed(program, whole))
    before = jax.tree.map(np.array, (state.model, state.optimizer_state, state.ema, state.recent))
    state, metrics = program.step(state, placed(program, none))
    assert (float(metrics["loss"]), float(metrics["tokens"])) == (0.0, 0.0)
    assert (int(state.step), int(state.skipped), float(metrics["skipped"])) == (2, 1, 1.0)
    after = (state.model, state.optimizer_state, state.ema, state.recent)
    assert tiny.equal(before, after)


@pytest.mark.slow
def test_a_guarded_run_can_be_searched_for_what_is_not_finite():
    """JAX's flags stop at a NaN or an infinity in any result: the window and EMA have none."""
    with jax.debug_nans(True), jax.debug_infs(True):
        program = tiny.program(spike_guard=3.0, ema=0.999)
        state = program.init()
        for seed in range(2):
            state, _ = program.step(state, placed(program, tiny.random_tokens(seed)))
    assert (int(state.step), int(state.skipped)) == (2, 0)
