"""The average of the parameters, the loss-spike guard, and bad steps of every kind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training import tiny
from training.step.loss_spike import LEAST, WINDOW, is_spike, no_losses, remember


def placed(program, tokens):
    return program.layout.place(tokens, tiny.BATCH)


LOSSES = st.integers(1, 100).map(lambda n: n / 8)


@given(st.lists(LOSSES, max_size=90), st.integers(1, 600).map(lambda n: n / 8))
def test_a_spike_is_a_loss_far_above_the_median_of_the_last_ones(losses, loss):
    """NumPy's median of the last WINDOW losses decides, once LEAST of them are known."""
    recent = no_losses()
    for value in losses:
        recent = remember(recent, jnp.float32(value))
    last = np.asarray(losses[-WINDOW:], np.float32)
    want = len(last) >= LEAST and np.float32(loss) > np.float32(3.0) * np.median(last)
    assert bool(is_spike(recent, jnp.float32(loss), 3.0)) == want


@pytest.mark.slow
def test_the_average_follows_the_applied_parameters():
    """A NumPy average of the parameters after every step; a step not applied leaves it alone."""
    program = tiny.program(ema=0.9)
    state = program.init()
    want = [np.array(x) for x in jax.tree.leaves(state.model)]
    for seed in range(3):
        state, _ = program.step(state, placed(program, tiny.random_tokens(seed)))
        fresh = [np.array(x) for x in jax.tree.leaves(state.model)]
        want = [0.9 * a + 0.1 * p for a, p in zip(want, fresh, strict=True)]
    for a, b in zip(jax.tree.leaves(state.ema), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    before = jax.tree.map(np.array, state.ema)
    state = dataclasses.replace(state, model=_spoiled(state.model, np.nan))
    state, _ = program.step(state, placed(program, tiny.random_tokens(3)))
    assert tiny.equal(before, state.ema)
    assert state.eval_params is state.ema


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


BAD = {
    "nan": np.nan,
    "infinite": np.inf,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("place", ["parameter", "moment"])
def test_what_is_not_finite_is_never_applied(kind, place):
    """NaN or infinity in a moment or in a parameter: counted, and nothing moves."""
    program = tiny.program()
    state = program.init()
    if place == "parameter":
        state = dataclasses.replace(state, model=_spoiled(state.model, BAD[kind]))
    else:
        state = dataclasses.replace(
            state, optimizer_state=_spoiled(state.optimizer_state, BAD[kind])
        )
    before = jax.tree.map(np.array, (state.model, state.optimizer_state))
    state, metrics = program.step(state, placed(program, tiny.random_tokens(0)))
    assert (int(state.step), int(state.skipped), float(metrics["skipped"])) == (1, 1, 1.0)
    assert tiny.equal(before, (state.model, state.optimizer_state))


def _spoiled(tree, value):
    """The first array of floats with `value` as its first number."""
    leaves, structure = jax.tree.flatten(tree)
    first = next(i for i, x in enumerate(leaves) if x.ndim and x.dtype == jnp.float32)
    leaves[first] = leaves[first].at[(0,) * leaves[first].ndim].set(value)
    return jax.tree.unflatten(structure, leaves)


@pytest.mark.slow
def test_a_batch_of_nothing_that_counts_changes_no_parameter_by_its_loss():
    """All masked: the loss is 0 and finite, and the step has no gradient."""
    program, tokens = tiny.program(masked=True), tiny.random_tokens(0)
    batch = placed(program, tiny.stored(tokens, np.zeros(tokens.shape)))
    state, metrics = program.step(program.init(), batch)
    assert (float(metrics["loss"]), float(metrics["tokens"])) == (0.0, 0.0)
    assert float(metrics["grad_norm"]) == 0.0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.model))
