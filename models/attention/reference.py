"""Attention in plain Haliax: all scores at once, in float32."""

from __future__ import annotations

import functools

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from models.axes import BATCH, HEAD_SIZE, KEY_POSITION, KV_HEADS, POSITION, Q_PER_KV

MASKED = -1e30
"""The score of a key that is not seen."""


@functools.partial(jax.checkpoint, static_argnums=(3, 4))
def reference(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    window: int | None,
    soft_cap: float | None,
    segment_ids: NamedArray | None,
) -> NamedArray:
    """Attention of scaled queries by plain matmuls.

    The scores are made again in the backward pass, as in splash: keeping them for every layer
    costs more time than that on a CPU, and batch * heads * position^2 numbers. Dividing by the
    softmax's sum comes after the matmul with the values, where there is less to divide.
    """
    keys = (BATCH, KV_HEADS, KEY_POSITION, HEAD_SIZE)
    k, v = (x.rename({POSITION: KEY_POSITION}).rearrange(keys) for x in (k, v))
    rows = (BATCH, KV_HEADS, Q_PER_KV, POSITION)
    scores = hax.dot(
        q.rearrange((*rows, HEAD_SIZE)),
        k,
        axis=HEAD_SIZE,
        out_axes=(*rows, KEY_POSITION),
        preferred_element_type=jnp.float32,
    )
    if soft_cap is not None:
        scores = soft_cap * hax.tanh(scores / soft_cap)
    visible = _visible(q.resolve_axis(POSITION), k.resolve_axis(KEY_POSITION), window, segment_ids)
    scores = hax.where(visible, scores, MASKED)
    # Any shift cancels, so the maximum needs no gradient.
    largest = hax.max(jax.lax.stop_gradient(scores), axis=KEY_POSITION)
    weights = hax.exp(scores - largest)
    out = hax.dot(weights.astype(v.dtype), v, axis=KEY_POSITION, preferred_element_type=jnp.float32)
    out = out / hax.sum(weights, axis=KEY_POSITION)
    return out.rearrange(q.axes).astype(q.dtype)


def _visible(
    Position: Axis, KeyPosition: Axis, window: int | None, segment_ids: NamedArray | None
) -> NamedArray:
    """Which keys a position attends to: boolean [position, key_position], by row with segments."""
    keys = hax.arange(KeyPosition)
    positions = hax.arange(Position).broadcast_to((Position, KeyPosition))
    causal = positions >= keys
    if window is not None:
        causal = causal & (positions - keys < window)
    if segment_ids is None:
        return causal
    of_keys = segment_ids.rename({POSITION: KEY_POSITION})
    both = (segment_ids.resolve_axis(BATCH), Position, KeyPosition)
    return causal & (segment_ids.broadcast_to(both) == of_keys)
