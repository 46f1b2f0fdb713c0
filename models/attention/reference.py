"""What attends to what, and attention in plain Haliax that materializes all scores in float32."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

import models.named as hax
from models.layers.axes import BATCH, HEAD_SIZE, KEY_POSITION, KV_HEADS, POSITION, Q_PER_KV
from models.named import Axis, NamedArray

MASKED = -1e30
"""The score of a masked key; its exponential is 0."""
RESIDUALS = "attention_residuals"
"""The checkpoint name of what the backward pass reads of the forward pass: output, log-sum-exp."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """Causal, and what else limits or caps the scores."""

    window: int | None = None  # positions each one attends to, itself included; None for all
    soft_cap: float | None = None  # c in c * tanh(score / c)
    segment_ids: NamedArray | None = None  # int32 [batch, position]; only equal ids are attended to
    normalized: bool = False  # queries and keys are, so that large scores are rare

    @property
    def ids_BP(self) -> Array | None:
        ids = self.segment_ids
        return None if ids is None else ids.rearrange((BATCH, POSITION)).array


def reference(q: NamedArray, k: NamedArray, v: NamedArray, mask: Mask) -> NamedArray:
    """Attention output with the axes and dtype of `q`, by plain matmuls; `q` is already scaled.

    The backward pass recomputes the scores: storing them takes longer on a CPU.
    """
    return jax.checkpoint(lambda q, k, v: _attention(q, k, v, mask))(q, k, v)


def _attention(q: NamedArray, k: NamedArray, v: NamedArray, mask: Mask) -> NamedArray:
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
    if mask.soft_cap is not None:
        scores = mask.soft_cap * hax.tanh(scores / mask.soft_cap)
    visible = _visible(q.resolve_axis(POSITION), k.resolve_axis(KEY_POSITION), mask)
    scores = hax.where(visible, scores, MASKED)
    # softmax(s) = exp(s - c) / sum exp(s - c) for any c: the maximum prevents overflow and has no
    # gradient.
    largest = hax.max(jax.lax.stop_gradient(scores), axis=KEY_POSITION)
    weights = hax.exp(scores - largest)
    out = hax.dot(weights.astype(v.dtype), v, axis=KEY_POSITION, preferred_element_type=jnp.float32)
    # head_size divisions per query, where those of the weights would be key_position.
    out = out / hax.sum(weights, axis=KEY_POSITION)
    return out.rearrange(q.axes).astype(q.dtype)


def _visible(Position: Axis, KeyPosition: Axis, mask: Mask) -> NamedArray:
    """Whether a position attends to a key: boolean; segments add a batch axis."""
    keys = hax.arange(KeyPosition)
    positions = hax.arange(Position).broadcast_to((Position, KeyPosition))
    causal = positions >= keys
    if mask.window is not None:
        causal = causal & (positions - keys < mask.window)
    if mask.segment_ids is None:
        return causal
    key_ids = mask.segment_ids.rename({POSITION: KEY_POSITION})
    both = (mask.segment_ids.resolve_axis(BATCH), Position, KeyPosition)
    return causal & (mask.segment_ids.broadcast_to(both) == key_ids)
