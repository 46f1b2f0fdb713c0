"""Blockwise attention against NumPy and against plain JAX, forward, backward and in memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.interpreters import partial_eval

from models.attention.blockwise import blockwise as attention
from models.attention.reference import Mask
from tests.models import small


def inputs(batch, position, kv_heads, q_per_kv, head_size, seed=0, dtype=jnp.float32):
    """Random queries, keys, values and output cotangent."""
    rng = np.random.default_rng(seed)
    kv = (batch, position, kv_heads, head_size)
    q = (batch, position, kv_heads, q_per_kv, head_size)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in (q, kv, kv, q))


def blockwise(q, k, v, *, window=None, soft_cap=None, segment_ids=None, block=None):
    ids = None if segment_ids is None else small.named(segment_ids)
    return attention(q, k, v, Mask(window, soft_cap, ids), block=block)


def segments(batch, position, seed=0):
    starts = np.random.default_rng(seed).random((batch, position)) < 4 / position
    return np.cumsum(starts, axis=1).astype(np.int32)


def plain(q, k, v, *, window, soft_cap, segment_ids):
    """The same by whole matrices, for JAX to differentiate."""
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", q, k)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    at = np.arange(q.shape[1])
    distance = at[:, None] - at[None, :]
    visible = (distance >= 0) & (distance < (window or len(at)))
    visible = visible[None, None, None]
    if segment_ids is not None:
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        visible = visible & same[:, None, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bgrqk,bkgd->bqgrd", weights, v)


def with_gradients(function, q, k, v, bar, **options):
    @jax.jit
    def run(q, k, v, bar):
        out, back = jax.vjp(functools.partial(function, **options), q, k, v)
        return out, *back(bar)

    return run(q, k, v, bar)


def check_against_plain(position, block, window, soft_cap, segmented, groups, seed):
    """Output and all three gradients."""
    q, k, v, bar = inputs(2, position, *groups, 4, seed)
    ids = jnp.asarray(segments(2, position, seed)) if segmented else None
    options = {"window": window, "soft_cap": soft_cap, "segment_ids": ids}
    got = with_gradients(blockwise, q, k, v, bar, block=block, **options)
    want = with_gradients(plain, q, k, v, bar, **options)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-5)


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
def test_equals_plain_attention(position, block, window, soft_cap, segmented, groups, seed):
    """The same for any row length, block and mask."""
    check_against_plain(position, block, window, soft_cap, segmented, groups, seed)


@pytest.mark.slow
def test_large_scores():
    """The softmax is shifted by the largest score so far, also between blocks."""
    q, k, v, bar = inputs(1, 24, 1, 2, 8)
    options = {"window": None, "soft_cap": None, "segment_ids": None}
    got = with_gradients(blockwise, q * 100, k, v, bar, block=8, **options)
    want = with_gradients(plain, q * 100, k, v, bar, **options)
    assert small.relative(got, want) < 1e-3
    saturated = with_gradients(blockwise, q * 1e6, k, v, bar, block=8, **options)
    assert all(np.isfinite(x).all() for x in saturated)


@pytest.mark.slow
def test_bfloat16_in_and_out():
    """Sixteen bits in, the same out; the statistics between are wide."""
    narrow = inputs(1, 64, 2, 2, 16, dtype=jnp.bfloat16)
    options = {"window": None, "soft_cap": None, "segment_ids": None}
    got = with_gradients(blockwise, *narrow, block=16, **options)
    assert {x.dtype for x in got} == {jnp.dtype(jnp.bfloat16)}
    want = with_gradients(plain, *(x.astype(jnp.float32) for x in narrow), **options)
    assert small.relative([x.astype(jnp.float32) for x in got], want) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 100])
def test_memory_grows_with_the_row_and_not_with_its_square(window):
    """Temporary memory of a gradient, as the compiler plans it, for rows of four times the length.

    Scores of a whole row would be 16 times as much; the plain form shows that this is seen here.
    """

    def planned(function, position, **options):
        shapes = jax.eval_shape(lambda: inputs(1, 8, 1, 1, 16))
        shapes = [jax.ShapeDtypeStruct((1, position, *x.shape[2:]), x.dtype) for x in shapes]
        options |= {"window": window, "soft_cap": None, "segment_ids": None}

        def run(q, k, v, bar):
            return jax.vjp(functools.partial(function, **options), q, k, v)[1](bar)

        compiled = jax.jit(run).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert planned(blockwise, 2048, block=64) < 5 * planned(blockwise, 512, block=64)
    assert planned(plain, 2048) > 12 * planned(plain, 512)
    assert planned(blockwise, 2048, block=64) < planned(plain, 2048) / 10


@pytest.mark.slow
def test_hidden_blocks_are_not_made():
    """A poisoned key outside every window of the later positions does not reach them."""
    q, k, v, _ = inputs(1, 32, 1, 1, 4)
    poisoned = v.at[0, 0].set(jnp.nan)
    options = {"window": 4, "soft_cap": None, "segment_ids": None, "block": 8}
    got = blockwise(q, k, poisoned, **options)
    assert np.isnan(got[0, :4]).all()
    # A block that is made multiplies the poison by a weight of 0, which is still poison.
    assert np.isfinite(got[0, 16:]).all()


def test_saved_by_name_the_scores_are_made_twice_and_not_three_times():
    """Saving "attention_residuals" keeps the output and log-sum-exp of the forward pass."""
    q, k, v, bar = inputs(1, 16, 1, 1, 4)
    names = jax.checkpoint_policies.save_only_these_names("attention_residuals")
    nothing = jax.checkpoint_policies.nothing_saveable

    def exponentials(policy):
        def objective(q, k, v):
            out = blockwise(q, k, v, window=None, soft_cap=None, segment_ids=None)
            return jnp.sum(out * bar)

        checkpointed = jax.checkpoint(objective, policy=policy)
        jaxpr = jax.make_jaxpr(jax.value_and_grad(checkpointed, argnums=(0, 1, 2)))(q, k, v).jaxpr
        used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * 4)
        return str(used).count(" exp ")

    assert exponentials(names) < exponentials(nothing)
