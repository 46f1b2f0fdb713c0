"""Blockwise attention against the reference, forward, backward and in memory."""

from __future__ import annotations

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.interpreters import partial_eval

from models.attention import blockwise as module
from tests.models import small
from tests.models.attention.attention_inputs import (
    attended,
    difference_from_reference,
    inputs,
    value_and_gradients,
)

difference = functools.partial(difference_from_reference, "blockwise")


@contextlib.contextmanager
def blocks_of(positions):
    """At most that many in a block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", positions)
        patch.setattr(module, "SHORT_BLOCK", positions)
        yield


@pytest.mark.slow
@settings(max_examples=6)
@given(
    position=st.integers(1, 40),
    block=st.integers(1, 48),
    window=st.none() | st.integers(1, 45),
    soft_cap=st.none() | st.floats(0.5, 5),
    segmented=st.booleans(),
    groups=st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]),
    seed=st.integers(0, 99),
)
def test_equals_the_reference(position, block, groups, **options):
    """Output and all three gradients, for any row length, block and mask."""
    with blocks_of(block):
        assert difference((2, position, *groups, 4), **options) < 3e-5


@pytest.mark.slow
def test_large_scores():
    """The softmax is shifted by the largest score so far, also between blocks."""
    q, *rest = inputs(1, 24, 1, 2, 8)
    with blocks_of(8):
        got = value_and_gradients("blockwise", q * 300, *rest)
        saturated = value_and_gradients("blockwise", q * 1e6, *rest)
    assert small.relative(got, value_and_gradients("reference", q * 300, *rest)) < 1e-3
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(saturated))


@pytest.mark.slow
def test_bfloat16_in_and_out():
    """Sixteen bits in, the same out; the statistics between are wide."""
    with blocks_of(16):
        assert difference((1, 64, 2, 2, 16), dtype=jnp.bfloat16) < 0.03
        got = value_and_gradients("blockwise", *inputs(1, 64, 2, 2, 16, dtype=jnp.bfloat16))
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 100])
def test_memory_grows_with_the_row_and_not_with_its_square(window):
    """Temporary memory of a gradient, as the compiler plans it, for rows of four times the length.

    Scores of a whole row would be 16 times as much; the reference shows that this is seen here.
    """

    def planned(backend, position):
        arrays = jax.eval_shape(lambda: inputs(1, position, 1, 1, 16))
        run = jax.jit(functools.partial(value_and_gradients, backend, window=window))
        return run.lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    with blocks_of(64):
        short, long = (planned("blockwise", position) for position in (512, 2048))
    assert long < 5 * short
    assert planned("reference", 2048) > 12 * planned("reference", 512)
    assert long < planned("reference", 2048) / 10


@pytest.mark.slow
def test_hidden_blocks_are_not_made():
    """A poisoned key outside every window of the later positions does not reach them."""
    q, k, v, _ = inputs(1, 32, 1, 1, 4)
    with blocks_of(8):
        got = attended(q, k, v.at["position", 0].set(jnp.nan), backend="blockwise", window=4)
    got = got.rearrange(("batch", "position", ...)).array
    assert np.isnan(got[0, :4]).all()
    # A block that is made multiplies the poison by a weight of 0, which is still poison.
    assert np.isfinite(got[0, 16:]).all()


def test_saved_by_name_the_scores_are_made_twice_and_not_three_times():
    """Saving "attention_residuals" keeps the output and log-sum-exp of the forward pass."""
    q, k, v, bar = inputs(1, 16, 1, 1, 4)

    def exponentials(policy):
        def objective(q, k, v):
            return jnp.sum((attended(q, k, v, backend="blockwise") * bar).array)

        gradient = jax.value_and_grad(jax.checkpoint(objective, policy=policy), argnums=(0, 1, 2))
        jaxpr = jax.make_jaxpr(gradient)(q, k, v).jaxpr
        used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * 4)
        return str(used).count(" exp ")

    policies = jax.checkpoint_policies
    by_name = policies.save_only_these_names("attention_residuals")
    assert exponentials(by_name) < exponentials(policies.nothing_saveable)
