"""Causal attention in plain JAX that materializes one block of scores at a time.

FlashAttention-2 (Dao, 2023, arXiv:2307.08691, algorithms 1 and 2) over square blocks of scores: an
online softmax rescales its running sums at each key block, and the backward pass recomputes each
block of scores from the saved log-sum-exp. Fully masked blocks are skipped. This back end serves
devices and shapes without a kernel.

Scores are stored as [keys, queries]. The matmuls that take a block of scores, or of their
gradients, then read it along its rows. Only blocks of queries, keys and values, which are as narrow
as a head, are transposed. The softmax's maximum and sum reduce over the major axis, which
vectorizes. Suffixes of names: B batch, P position, G kv_heads, R q_per_kv, D head_size, K and Q
key and query positions of one block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from pipeline.errors import InputError

BLOCK, SHORT_BLOCK = 256, 128
LONG = 1024
"""Sequence length from which blocks have `BLOCK` positions.

Small blocks skip more of the masked scores, large ones need fewer loop iterations.
"""
MASKED = -1e30
RESIDUALS = "attention_residuals"

Carry = TypeVar("Carry")


class _Plan(NamedTuple):
    """Static arguments of a call: mask, soft cap, and `blocks` blocks of `size` positions."""

    window: int | None
    soft_cap: float | None
    blocks: int
    size: int

    def first_key_block(self, query_block: Array | int) -> Array | int:
        """The first key block that a query block attends to; the last one has the same index."""
        if self.window is None:
            return 0
        oldest = query_block * self.size - (self.window - 1)
        return jnp.maximum(oldest, 0) // self.size

    def last_query_block(self, key_block: Array | int) -> Array | int:
        """The last query block that attends to a key block; the first one has the same index."""
        if self.window is None:
            return self.blocks - 1
        newest = key_block * self.size + (self.size - 1) + (self.window - 1)
        return jnp.minimum(newest // self.size, self.blocks - 1)


def blockwise(
    q: Array,
    k: Array,
    v: Array,
    *,
    window: int | None,
    soft_cap: float | None,
    segment_ids: Array | None,
    block: int | None = None,
) -> Array:
    """Attention output with the axes and dtype of `q`; softmax statistics are float32.

    Memory beyond inputs and output: a few times batch * heads * block^2 float32 scores.

    Args:
        q: scaled queries [batch, position, kv_heads, q_per_kv, head_size].
        k: keys [batch, position, kv_heads, head_size], in the queries' dtype.
        v: values, same shape and dtype as the keys.
        window: positions each position attends to, itself included; None for all.
        soft_cap: c in c * tanh(score / c), or None.
        segment_ids: int32 [batch, position]; positions attend only to positions with equal ids.
            None: one segment.
        block: maximum positions in a block; None for the faster size on a CPU.

    Raises:
        InputError: `window` or `block` is below 1.
    """
    position = q.shape[1]
    if block is None:
        block = BLOCK if position >= LONG else SHORT_BLOCK
    for name, value in (("window", window), ("block", block)):
        if value is not None and value < 1:
            raise InputError(
                f"blockwise attention: expected a {name} of at least 1, found {value}; "
                "a position always sees itself"
            )
    blocks = -(-position // block)
    # Equal blocks need less padding: 300 positions take 3 * 100 instead of 3 * 128.
    plan = _Plan(window, soft_cap, blocks, -(-position // blocks))
    return _attention(plan, q, k, v, segment_ids)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: _Plan, q: Array, k: Array, v: Array, ids: Array | None) -> Array:
    return _forward(plan, q, k, v, ids)[0]


def _forward(
    plan: _Plan, q: Array, k: Array, v: Array, ids: Array | None
) -> tuple[Array, tuple[Array | None, ...]]:
    q_BGRPD, k_BGPD, v_BGPD, ids_BP = _blocked(plan, q, k, v, ids)
    # Transposed once, outside the loop over blocks.
    v_BGDP = jnp.swapaxes(v_BGPD, 2, 3)

    def one_query_block(query_block: Array | int) -> tuple[Array, Array]:
        q_BGRQD = _take(plan, q_BGRPD, query_block, 3)

        def one_key_block(back: Array | int, carry: _Softmax) -> _Softmax:
            key_block = query_block - back
            k_BGKD = _take(plan, k_BGPD, key_block, 2)
            s_BGKRQ = _scores(plan, q_BGRQD, k_BGKD)
            visible = _visible(plan, query_block, key_block, ids_BP)
            s_BGKRQ = jnp.where(visible, s_BGKRQ, MASKED)
            return carry.add(s_BGKRQ, _take(plan, v_BGDP, key_block, 3))

        # From the diagonal block backwards: there every query attends to itself, so the running
        # maximum is a visible score from the first block on, and exp(MASKED - maximum) is 0.
        blocks = query_block - plan.first_key_block(query_block) + 1
        softmax = _repeat(plan, blocks, one_key_block, _Softmax.empty(q_BGRQD))
        return softmax.result(q.dtype)

    out_BGRPD, lse_BGRP = _map_blocks(plan, one_query_block)
    position = q.shape[1]
    out = jnp.transpose(out_BGRPD[:, :, :, :position], (0, 3, 1, 2, 4))
    out = checkpoint_name(out, RESIDUALS)
    lse = checkpoint_name(lse_BGRP[..., :position], RESIDUALS)
    return out, (q, k, v, ids, out, lse)


class _Softmax(NamedTuple):
    """Online softmax: running sums over the keys so far, relative to the running maximum.

    The output is values / sum. Subtracting the maximum keeps every exponential at most 1.

    Attributes:
        largest_BGRQ: maximum score so far.
        sum_BGRQ: sum of exp(score - largest).
        values_BGDRQ: sum of exp(score - largest) * value.
    """

    largest_BGRQ: Array
    sum_BGRQ: Array
    values_BGDRQ: Array

    @staticmethod
    def empty(q_BGRQD: Array) -> _Softmax:
        batch, groups, heads, queries, width = q_BGRQD.shape
        rows = (batch, groups, heads, queries)
        return _Softmax(
            jnp.full(rows, MASKED, jnp.float32),
            jnp.zeros(rows, jnp.float32),
            jnp.zeros((batch, groups, width, heads, queries), jnp.float32),
        )

    def add(self, s_BGKRQ: Array, v_BGDK: Array) -> _Softmax:
        """The sums with one more block of keys; earlier sums are rescaled to the new maximum."""
        largest = jnp.maximum(self.largest_BGRQ, jnp.max(s_BGKRQ, axis=2))
        weights = jnp.exp(s_BGKRQ - largest[:, :, None])
        shrink = jnp.exp(self.largest_BGRQ - largest)
        more = _matmul("bgdk,bgkrq->bgdrq", v_BGDK, weights.astype(v_BGDK.dtype))
        return _Softmax(
            largest,
            self.sum_BGRQ * shrink + jnp.sum(weights, axis=2),
            self.values_BGDRQ * shrink[:, :, None] + more,
        )

    def result(self, dtype: jnp.dtype) -> tuple[Array, Array]:
        """Output [B, G, R, Q, D] and log-sum-exp [B, G, R, Q]."""
        out_BGDRQ = self.values_BGDRQ / self.sum_BGRQ[:, :, None]
        out = jnp.moveaxis(out_BGDRQ.astype(dtype), 2, 4)
        return out, self.largest_BGRQ + jnp.log(self.sum_BGRQ)


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
    delta_BGRP = _pad(plan, jnp.transpose(delta, (0, 2, 3, 1)), 3)
    lse_BGRP = _pad(plan, lse, 3)

    def one_pair(key_block: Array | int, ahead: Array | int, carry: _Cotangents) -> _Cotangents:
        query_block = key_block + ahead
        q_BGRQD, bar_BGRQD = (_take(plan, x, query_block, 3) for x in (q_BGRPD, bar_BGRPD))
        lse_BGRQ, delta_BGRQ = (_take(plan, x, query_block, 3) for x in (lse_BGRP, delta_BGRP))
        k_BGKD, v_BGKD = (_take(plan, x, key_block, 2) for x in (k_BGPD, v_BGPD))
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
        q_bar = _matmul("bgdk,bgkrq->bgdrq", _take(plan, k_BGDP, key_block, 3), s_bar)
        return carry.add(plan, query_block, q_bar, k_bar, v_bar)

    def one_key_block(q_bar: Array, key_block: Array | int) -> tuple[Array, tuple[Array, Array]]:
        zero = jnp.zeros((*k_BGPD.shape[:2], plan.size, k.shape[-1]), jnp.float32)
        blocks = plan.last_query_block(key_block) - key_block + 1
        pair = functools.partial(one_pair, key_block)
        bars = _repeat(plan, blocks, pair, _Cotangents(q_bar, zero, zero))
        return bars.queries_BGDRP, (bars.keys_BGKD, bars.values_BGKD)

    batch, groups, heads, positions, width = q_BGRPD.shape
    q_bar = jnp.zeros((batch, groups, width, heads, positions), jnp.float32)
    if plan.blocks == 1:
        q_bar, kv_bars = one_key_block(q_bar, 0)
    else:
        q_bar, stacked = jax.lax.scan(one_key_block, q_bar, jnp.arange(plan.blocks))
        kv_bars = tuple(_join(x, 2) for x in stacked)
    position = q.shape[1]
    q_bar = jnp.transpose(q_bar[..., :position], (0, 4, 1, 3, 2)).astype(q.dtype)
    k_bar, v_bar = (jnp.swapaxes(x[:, :, :position], 1, 2) for x in kv_bars)
    return q_bar, k_bar.astype(k.dtype), v_bar.astype(v.dtype), None


class _Cotangents(NamedTuple):
    """Float32 gradients of all queries and of the keys and values of one block."""

    queries_BGDRP: Array
    keys_BGKD: Array
    values_BGKD: Array

    def add(
        self, plan: _Plan, query_block: Array | int, q_bar: Array, k_bar: Array, v_bar: Array
    ) -> _Cotangents:
        """The gradients with the contributions of one block of scores added."""
        queries = _take(plan, self.queries_BGDRP, query_block, 4) + q_bar
        if plan.blocks > 1:
            start = query_block * plan.size
            queries = jax.lax.dynamic_update_slice_in_dim(self.queries_BGDRP, queries, start, 4)
        return _Cotangents(queries, self.keys_BGKD + k_bar, self.values_BGKD + v_bar)


_attention.defvjp(_forward, _backward)


def _scores(plan: _Plan, q_BGRQD: Array, k_BGKD: Array) -> Array:
    """Float32 scores [B, G, K, R, Q], soft-capped but not masked."""
    scores = _matmul("bgkd,bgrqd->bgkrq", k_BGKD, q_BGRQD)
    return scores if plan.soft_cap is None else plan.soft_cap * jnp.tanh(scores / plan.soft_cap)


def _matmul(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _visible(
    plan: _Plan, query_block: Array | int, key_block: Array | int, ids_BP: Array | None
) -> Array:
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
    ids_BK, ids_BQ = (_take(plan, ids_BP, block, 1) for block in (key_block, query_block))
    return visible & (ids_BK[:, None, :, None, None] == ids_BQ[:, None, None, None, :])


def _blocked(
    plan: _Plan, q: Array, k: Array, v: Array, ids: Array | None
) -> tuple[Array, Array, Array, Array | None]:
    """The inputs with heads before positions, and positions padded to whole blocks.

    Padding follows every real position, so the causal mask hides it from all of them.
    """
    k, v = (_pad(plan, jnp.swapaxes(x, 1, 2), 2) for x in (k, v))
    return _heads_first(plan, q), k, v, None if ids is None else _pad(plan, ids, 1)


def _heads_first(plan: _Plan, x_BPGRD: Array) -> Array:
    return _pad(plan, jnp.transpose(x_BPGRD, (0, 2, 3, 1, 4)), 3)


def _pad(plan: _Plan, x: Array, axis: int) -> Array:
    missing = plan.blocks * plan.size - x.shape[axis]
    widths = [(0, missing if at == axis else 0) for at in range(x.ndim)]
    return jnp.pad(x, widths) if missing else x


def _take(plan: _Plan, x: Array, block: Array | int, axis: int) -> Array:
    if plan.blocks == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(x, block * plan.size, plan.size, axis)


def _repeat(
    plan: _Plan, times: Array | int, body: Callable[[Array | int, Carry], Carry], start: Carry
) -> Carry:
    """The carry after `body(i, carry)` for i in 0..times - 1; a single block needs no loop."""
    return body(0, start) if plan.blocks == 1 else jax.lax.fori_loop(0, times, body, start)


def _map_blocks(
    plan: _Plan, of_block: Callable[[Array | int], tuple[Array, Array]]
) -> tuple[Array, Array]:
    """The outputs of `of_block(index)` for every block, joined along positions (axis 3)."""
    if plan.blocks == 1:
        return of_block(0)
    out, lse = jax.lax.map(of_block, jnp.arange(plan.blocks))
    return _join(out, 3), _join(lse, 3)


def _join(x: Array, axis: int) -> Array:
    """Merge [blocks, ..., size at `axis`, ...] into [..., blocks * size, ...]."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
