"""Our TPU kernel, interpreted, against float64 and the reference: masks, sizes, scales, devices."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from models.attention import ponente, tpu_kernel
from models.attention.tpu_scores import Shape
from models.shape.tpu_tiles import SAFE, Row, Sight, choose_sight
from tests.models.attention.attention_inputs import difference_from_reference, small_blocks

difference = functools.partial(difference_from_reference, "ponente")
"""Of our kernel from the reference, in the output and all three gradients."""


def exact(q, k, v, ids, window, cap, bar):
    """Output and gradients in float64, arrays as the kernel's; a loop over rows and heads."""
    q, k, v, bar = (np.asarray(x, np.float64) for x in (q, k, v, bar))
    at = np.arange(q.shape[3])
    out, q_bar, k_bar, v_bar = (np.zeros_like(x) for x in (q, q, k, v))
    for row, head in np.ndindex(q.shape[:2]):
        kv = head // (q.shape[1] // k.shape[1])
        seen = at[:, None] <= at
        if window is not None:
            seen &= at - at[:, None] < window
        if ids is not None:
            seen &= ids[row][:, None] == ids[row]
        scores = k[row, kv].T @ q[row, head]
        slope = 1.0
        if cap is not None:
            share = np.tanh(scores / cap)
            scores, slope = cap * share, 1 - share**2
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(0))
        weights /= weights.sum(0)
        out[row, head] = v[row, kv] @ weights
        weights_bar = v[row, kv].T @ bar[row, head]
        inner = (bar[row, head] * out[row, head]).sum(0)
        scores_bar = weights * (weights_bar - inner) * slope
        q_bar[row, head] = k[row, kv] @ scores_bar
        k_bar[row, kv] += q[row, head] @ scores_bar.T
        v_bar[row, kv] += bar[row, head] @ weights.T
    return out, q_bar, k_bar, v_bar


@functools.partial(jax.jit, static_argnums=0)
def run(shape, q, k, v, ids, bar):
    starts = jnp.arange(0, shape.queries, shape.sight.block, dtype=jnp.int32)
    out, pull = jax.vjp(lambda *x: ponente.attention(shape, starts, *x, ids), q, k, v)
    return out, *pull(bar)


def error(
    *,
    blocks=2,
    block=256,
    chunk=128,
    heads=2,
    kv_heads=1,
    head_size=64,
    window=None,
    cap=None,
    cuts=0.0,
    scale=1.0,
    shift=False,
    dtype=jnp.float32,
    seed=0,
    change=None,
):
    """The largest difference of output and gradients from float64, relative to the largest value

    Documents end after a position with the probability `cuts`; a quarter of the ids come again.
    """
    rng = np.random.default_rng(seed)
    position = blocks * block

    def draw(heads):
        return rng.normal(size=(2, heads, head_size, position))

    q, k, v, bar = (
        draw(heads) * scale * head_size**-0.5,
        draw(kv_heads),
        draw(kv_heads),
        draw(heads),
    )
    if change is not None:
        change(q, k, v)
    q, k, v, bar = (jnp.asarray(x, dtype) for x in (q, k, v, bar))
    ids = np.cumsum(rng.random((2, position)) < cuts, 1)
    ids = np.where(rng.random((2, 1)) < 0.25, ids % 3, ids).astype(np.int32) if cuts else None
    window = None if window is None or window >= position else window
    shape = Shape(
        *(heads, kv_heads, position, position, head_size),
        *(Sight(block, chunk, window), cap, ids is not None, shift),
        interpret=True,
    )
    found = run(shape, q, k, v, None if ids is None else (ids, ids), bar)
    wanted = exact(q, k, v, ids, window, cap, bar)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in found)
    # Where gradients of scores cancel, they are zero: relative to what they are multiplied with.
    least = (1, float(abs(k).max()), float(abs(q).max()), 1)
    return max(
        np.abs(np.asarray(x, np.float64) - want).max() / max(np.abs(want).max(), size, 1e-3)
        for x, want, size in zip(found, wanted, least, strict=True)
    )


@pytest.mark.slow
@settings(max_examples=12, phases=(Phase.explicit, Phase.generate))  # shrinking takes minutes
@given(
    sizes=st.sampled_from([(3, 128, 128), (1, 256, 256), (2, 256, 128), (1, 384, 128)]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    head_size=st.sampled_from([64, 128, 256]),
    window=st.none() | st.integers(1, 600),
    cap=st.none() | st.floats(0.5, 100),
    cuts=st.sampled_from([0.0, 0.002, 0.02, 0.5]),
    scale=st.sampled_from([0.0, 1.0, 5.0, 100.0]),
    shift=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_mask_and_scale_equals_float64(sizes, heads, head_size, **options):
    """Whatever the mask hides and however large the scores are."""
    blocks, block, chunk = sizes
    found = error(
        **{"blocks": blocks, "block": block, "chunk": chunk, "head_size": head_size},
        **{"heads": heads[0], "kv_heads": heads[1]},
        **options,
    )
    # Float32 scores of up to 4 x scale, sums of up to 256 products each rounded to 2^-24 of them.
    assert found < 1e-5 + 3e-6 * options["scale"]


@pytest.mark.slow
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_in_bfloat16(shift, scale):
    """Within what rounding weights and results to 8 bits costs, shifted or not."""
    assert error(scale=scale, shift=shift, dtype=jnp.bfloat16, window=200, cuts=0.01) < 0.015


def constant(q, k, v):
    k[...] = k[..., :1]


def one_large(q, k, v):
    k[..., 7] *= 1000


def opposite(bound):
    """All scores of a query are -bound but its own first key's, which is bound."""

    def change(q, k, v):
        k[...] = np.eye(k.shape[2])[:, :1] * -1.0
        k[..., 0] *= -1
        q[...] = np.eye(k.shape[2])[:, :1] * bound

    return change


@pytest.mark.slow
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize(
    "change",
    [constant, one_large, opposite(SAFE - 1), opposite(80.0), opposite(-(SAFE - 1)), opposite(-80)],
    ids=["constant", "one_large", "59", "80", "-59", "-80"],
)
def test_extreme_scores(change, shift):
    """On both sides of the bound below which nothing is shifted: the worst that it allows, too."""
    assert error(change=change, shift=shift, window=300) < 1e-4


def one_head_is_large(q, k, v):
    k[1, 1] *= 300


@pytest.mark.slow
def test_the_norms_are_those_of_the_rows_own_head():
    """One key head of one row has scores beyond the bound, and its neighbours have not."""
    options = {"heads": 4, "kv_heads": 2, "block": 128}
    assert error(change=one_head_is_large, **options) < 3e-4


@pytest.mark.slow
def test_without_a_table_of_what_segments_hide(monkeypatch):
    """More chunks than scalar memory has room for: every one is masked, with the same result."""
    monkeypatch.setattr(tpu_kernel, "MOST_KINDS", 1)
    run.clear_cache()
    tpu_kernel.forward.clear_cache()
    assert error(cuts=0.01) < 3e-5
    run.clear_cache()
    tpu_kernel.forward.clear_cache()


@pytest.mark.slow
def test_rows_that_see_one_key():
    """A window of one: the output is the value, and no gradient reaches a score."""
    assert error(window=1, blocks=1) < 3e-5
    assert error(cuts=1.0, blocks=1) < 3e-5


@pytest.mark.slow
def test_through_the_common_call():
    """Grouped heads and everything a mask has, in several blocks and chunks."""
    options = {"segmented": True, "soft_cap": 0.9, "window": 60}
    with small_blocks():
        assert difference((2, 512, 2, 2, 64), **options) < 1e-5


@pytest.mark.slow
def test_with_the_chosen_sizes():
    """Two blocks of the largest size and one odd row."""
    assert difference((1, 2560, 1, 1, 64)) < 1e-5
    assert choose_sight(Row(2560, 2560, 64, None, shift=True)).block == 1280
