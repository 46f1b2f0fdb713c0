"""Attention in plain Haliax that materializes all scores in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import models.named as hax
from models.layers.axes import BATCH, HEAD_SIZE, KEY_POSITION, KV_HEADS, POSITION, Q_PER_KV
from models.named import Axis, NamedArray

MASKED = -1e30
"""The score of a masked key; its exponential is 0."""


@functools.partial(jax.checkpoint, static_argnums=(3, 4))
def reference(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    window: int | None,
    soft_cap: float | None,
    segment_ids: NamedArray | None,
) -> NamedArray:
    """Attention output with the axes and dtype of `q`, by plain matmuls; `q` is already scaled.

    The backward pass recomputes the scores, as splash does: storing batch * heads * position^2 of
    them for every layer takes more time on a CPU than the recomputation. The division by the
    softmax's sum follows the matmul with the values: head_size divisions per query instead of
    key_position.
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
    # softmax(s) = exp(s - c) / sum exp(s - c) for any c: the maximum prevents overflow and has no
    # gradient.
    largest = hax.max(jax.lax.stop_gradient(scores), axis=KEY_POSITION)
    weights = hax.exp(scores - largest)
    out = hax.dot(weights.astype(v.dtype), v, axis=KEY_POSITION, preferred_element_type=jnp.float32)
    out = out / hax.sum(weights, axis=KEY_POSITION)
    return out.rearrange(q.axes).astype(q.dtype)


def _visible(
    Position: Axis, KeyPosition: Axis, window: int | None, segment_ids: NamedArray | None
) -> NamedArray:
    """Whether a position attends to a key: boolean, with segments for each sequence of the batch.

    Returns:
        [position, key_position], or [batch, position, key_position] with segments.
    """
    keys = hax.arange(KeyPosition)
    positions = hax.arange(Position).broadcast_to((Position, KeyPosition))
    causal = positions >= keys
    if window is not None:
        causal = causal & (positions - keys < window)
    if segment_ids is None:
        return causal
    key_ids = segment_ids.rename({POSITION: KEY_POSITION})
    both = (segment_ids.resolve_axis(BATCH), Position, KeyPosition)
    return causal & (segment_ids.broadcast_to(both) == key_ids)
