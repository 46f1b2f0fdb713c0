"""Causal attention in plain JAX that materializes one block of scores at a time.

FlashAttention-2 (Dao, 2023, arXiv:2307.08691, algorithms 1 and 2) over square blocks of scores;
fully masked ones are skipped. For devices and shapes without a kernel.

Scores are stored as [keys, queries]: the matmuls that take a block of scores, or of their
gradients, then read it along its rows, and the softmax reduces over a major axis, which vectorizes.
Suffixes of names: B batch, P position, G kv_heads, R q_per_kv, D head_size, K and Q key and query
positions of one block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from models.attention.reference import MASKED, RESIDUALS, Mask

BLOCK, SHORT_BLOCK = 256, 128
LONG = 1024
"""Positions from which blocks are large: small ones skip more scores, large ones loop less."""


class _Plan(NamedTuple):
    """Static arguments of a call: mask, soft cap, and `blocks` blocks of `size` positions."""

    window: int | None
    soft_cap: float | None
    blocks: int
    size: int

    def first_key_block(self, query_block: Array) -> Array | int:
        """The first key block that a query block attends to; the last one has the same index."""
        if self.window is None:
            return 0
        return jnp.maximum(query_block * self.size - (self.window - 1), 0) // self.size

    def last_query_block(self, key_block: Array) -> Array | int:
        """The last query block that attends to a key block; the first one has the same index."""
        if self.window is None:
            return self.blocks - 1
        newest = key_block * self.size + (self.size - 1) + (self.window - 1)
        return jnp.minimum(newest // self.size, self.blocks - 1)

    def pad(self, x: Array, axis: int) -> Array:
        """Whole blocks; padding follows every real position, so the causal mask hides it."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, self.blocks * self.size - x.shape[axis])
        return jnp.pad(x, widths)

    def take(self, x: Array, block: Array, axis: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, block * self.size, self.size, axis)


def blockwise(q: Array, k: Array, v: Array, mask: Mask) -> Array:
    """Attention output with the axes and dtype of `q`; softmax statistics are float32.

    `q` are scaled queries [batch, position, kv_heads, q_per_kv, head_size], `k` and `v` [batch,
    position, kv_heads, head_size] in their dtype.
    """
    position = q.shape[1]
    blocks = -(-position // (BLOCK if position >= LONG else SHORT_BLOCK))
    # Equal blocks need less padding: 300 positions take 3 * 100 instead of 3 * 128.
    plan = _Plan(mask.window, mask.soft_cap, blocks, -(-position // blocks))
    return _attention(plan, q, k, v, mask.ids_BP)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: _Plan, q: Array, k: Array, v: Array, ids: Array | None) -> Array:
    return _forward(plan, q, k, v, ids)[0]


def _forward(
    plan: _Plan, q: Array, k: Array, v: Array, ids: Array | None
) -> tuple[Array, tuple[Array | None, ...]]:
    q_BGRPD, k_BGPD, v_BGPD, ids_BP = _blocked(plan, q, k, v, ids)
    v_BGDP = jnp.swapaxes(v_BGPD, 2, 3)

    def one_query_block(query_block: Array) -> tuple[Array, Array]:
        q_BGRQD = plan.take(q_BGRPD, query_block, 3)

        def one_key_block(back: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            largest_BGRQ, sum_BGRQ, values_BGDRQ = carry
            key_block = query_block - back
            s_BGKRQ = _scores(plan, q_BGRQD, plan.take(k_BGPD, key_block, 2))
            visible = _visible(plan, query_block, key_block, ids_BP)
            s_BGKRQ = jnp.where(visible, s_BGKRQ, MASKED)
            v_BGDK = plan.take(v_BGDP, key_block, 3)
            # Rescale the sums so far to the new maximum: every exponential is at most 1.
            largest = jnp.maximum(largest_BGRQ, jnp.max(s_BGKRQ, axis=2))
            weights = jnp.exp(s_BGKRQ - largest[:, :, None])
            shrink = jnp.exp(largest_BGRQ - largest)
            more = _matmul("bgdk,bgkrq->bgdrq", v_BGDK, weights.astype(v_BGDK.dtype))
            return (
                largest,
                sum_BGRQ * shrink + jnp.sum(weights, axis=2),
                values_BGDRQ * shrink[:, :, None] + more,
            )

        batch, groups, heads, queries, width = q_BGRQD.shape
        rows = (batch, groups, heads, queries)
        values = jnp.zeros((batch, groups, width, heads, queries), jnp.float32)
        start = jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), values
        # From the diagonal block backwards: there every query attends to itself, so the running
        # maximum is a visible score from the first block on, and exp(MASKED - maximum) is 0.
        blocks = query_block - plan.first_key_block(query_block) + 1
        largest, total, values = jax.lax.fori_loop(0, blocks, one_key_block, start)
        out_BGDRQ = values / total[:, :, None]
        return jnp.moveaxis(out_BGDRQ.astype(q.dtype), 2, 4), largest + jnp.log(total)

    out, lse = jax.lax.map(one_query_block, jnp.arange(plan.blocks))
    position = q.shape[1]
    out_BGRPD, lse_BGRP = _join(out, 3), _join(lse, 3)
    out = jnp.transpose(out_BGRPD[:, :, :, :position], (0, 3, 1, 2, 4))
    out = checkpoint_name(out, RESIDUALS)
    lse = checkpoint_name(lse_BGRP[..., :position], RESIDUALS)
    return out, (q, k, v, ids, out, lse)


def _backward(
    plan: _Plan, residuals: tuple[Array, Array, Array, Array | None, Array, Array], out_bar: Array
) -> tuple[Array, Array, Array, None]:
    q, k, v, ids, out, lse = residuals
    q_BGRPD, k_BGPD, v_BGPD, ids_BP = _blocked(plan, q, k, v, ids)
    k_BGDP = jnp.swapaxes(k_BGPD, 2, 3)
    bar_BGRPD = _heads_first(plan, out_bar)
    # With P = exp(S - lse), O = P V and dP = dO V^T, the gradient of the scores is
    # dS = P * (dP - delta), where delta = sum_k P dP = sum_d O dO needs no scores.
    delta = jnp.sum(out.astype(jnp.float32) * out_bar.astype(jnp.float32), axis=-1)
    delta_BGRP = plan.pad(jnp.transpose(delta, (0, 2, 3, 1)), 3)
    lse_BGRP = plan.pad(lse, 3)

    def one_pair(key_block: Array, ahead: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        query_block = key_block + ahead
        q_BGRQD, bar_BGRQD = (plan.take(x, query_block, 3) for x in (q_BGRPD, bar_BGRPD))
        lse_BGRQ, delta_BGRQ = (plan.take(x, query_block, 3) for x in (lse_BGRP, delta_BGRP))
        k_BGKD, v_BGKD = (plan.take(x, key_block, 2) for x in (k_BGPD, v_BGPD))
        s_BGKRQ = _scores(plan, q_BGRQD, k_BGKD)
        visible = _visible(plan, query_block, key_block, ids_BP)
        # The rows of padding in `bar` and `delta` are 0, so padded queries contribute nothing.
        weights = jnp.where(visible, jnp.exp(s_BGKRQ - lse_BGRQ[:, :, None]), 0.0)
        v_bar = _matmul("bgkrq,bgrqd->bgkd", weights.astype(q.dtype), bar_BGRQD)
        s_bar = _matmul("bgkd,bgrqd->bgkrq", v_BGKD, bar_BGRQD) - delta_BGRQ[:, :, None]
        s_bar = weights * s_bar
        if plan.soft_cap is not None:
            # d/dx c tanh(x / c) = 1 - (s / c)^2 at the capped score s.
            s_bar = s_bar * (1.0 - jnp.square(s_BGKRQ / plan.soft_cap))
        s_bar = s_bar.astype(q.dtype)
        k_bar = _matmul("bgkrq,bgrqd->bgkd", s_bar, q_BGRQD)
        q_bar = _matmul("bgdk,bgkrq->bgdrq", plan.take(k_BGDP, key_block, 3), s_bar)
        queries_BGDRP, keys_BGKD, values_BGKD = carry
        queries = plan.take(queries_BGDRP, query_block, 4) + q_bar
        start = query_block * plan.size
        queries_BGDRP = jax.lax.dynamic_update_slice_in_dim(queries_BGDRP, queries, start, 4)
        return queries_BGDRP, keys_BGKD + k_bar, values_BGKD + v_bar

    def one_key_block(q_bar: Array, key_block: Array) -> tuple[Array, tuple[Array, Array]]:
        zero = jnp.zeros((*k_BGPD.shape[:2], plan.size, k.shape[-1]), jnp.float32)
        blocks = plan.last_query_block(key_block) - key_block + 1
        pair = functools.partial(one_pair, key_block)
        q_bar, k_bar, v_bar = jax.lax.fori_loop(0, blocks, pair, (q_bar, zero, zero))
        return q_bar, (k_bar, v_bar)

    batch, groups, heads, positions, width = q_BGRPD.shape
    q_bar = jnp.zeros((batch, groups, width, heads, positions), jnp.float32)
    q_bar, stacked = jax.lax.scan(one_key_block, q_bar, jnp.arange(plan.blocks))
    position = q.shape[1]
    q_bar = jnp.transpose(q_bar[..., :position], (0, 4, 1, 3, 2)).astype(q.dtype)
    k_bar, v_bar = (jnp.swapaxes(_join(x, 2)[:, :, :position], 1, 2) for x in stacked)
    return q_bar, k_bar.astype(k.dtype), v_bar.astype(v.dtype), None


_attention.defvjp(_forward, _backward)


def _scores(plan: _Plan, q_BGRQD: Array, k_BGKD: Array) -> Array:
    """Float32 scores [B, G, K, R, Q], soft-capped but not masked."""
    scores = _matmul("bgkd,bgrqd->bgkrq", k_BGKD, q_BGRQD)
    return scores if plan.soft_cap is None else plan.soft_cap * jnp.tanh(scores / plan.soft_cap)


def _matmul(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _visible(plan: _Plan, query_block: Array, key_block: Array, ids_BP: Array | None) -> Array:
    """Whether a query of one block attends to a key of another: boolean [B or 1, 1, K, 1, Q]."""
    inside = jnp.arange(plan.size)
    offset = (query_block - key_block) * plan.size
    distance = inside[None, :] - inside[:, None] + offset
    visible = distance >= 0
    if plan.window is not None:
        visible &= distance < plan.window
    visible = visible[None, None, :, None, :]
    if ids_BP is None:
        return visible
    ids_BK, ids_BQ = (plan.take(ids_BP, block, 1) for block in (key_block, query_block))
    return visible & (ids_BK[:, None, :, None, None] == ids_BQ[:, None, None, None, :])


def _blocked(plan: _Plan, q: Array, k: Array, v: Array, ids: Array | None) -> Any:
    """The inputs with heads before positions, and positions padded to whole blocks."""
    k, v = (plan.pad(jnp.swapaxes(x, 1, 2), 2) for x in (k, v))
    return _heads_first(plan, q), k, v, None if ids is None else plan.pad(ids, 1)


def _heads_first(plan: _Plan, x_BPGRD: Array) -> Array:
    return plan.pad(jnp.transpose(x_BPGRD, (0, 2, 3, 1, 4)), 3)


def _join(x: Array, axis: int) -> Array:
    """Merge [blocks, ..., size at `axis`, ...] into [..., blocks * size, ...]."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
