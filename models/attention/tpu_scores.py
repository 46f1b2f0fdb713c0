"""What both TPU kernels of ours compute of a piece: products, scores, and who sees whom."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from models.attention.reference import MASKED
from models.shape.tpu_tiles import LANES, Piece, Sight

SKIP, MASK, PLAIN = range(3)
"""What segments make of a chunk: no query of the block sees a key, some see some, all see all."""

Ids = tuple[Array, Array] | None
"""Segment ids of queries [batch, queries] and of keys [batch, keys], int32."""


@dataclass(frozen=True)
class Shape:
    """Static sizes of the kernels on one device.

    `shift`: all scores are shifted by a running maximum; else only those of blocks whose norms
    allow scores beyond `SAFE`. `buffers` of a head's keys and values are in vector memory; with 2
    the next are loaded during computation.
    """

    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_size: int
    sight: Sight
    soft_cap: float | None
    segments: bool
    shift: bool
    buffers: int = 2
    interpret: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def blocks(self) -> int:
        return self.queries // self.sight.block


def kinds_of(shape: Shape, q_ids_BP: Array, k_ids_BP: Array) -> Array:
    """What segments make of each chunk, int32 [batch * blocks * chunks]."""
    batch = len(q_ids_BP)
    queries = q_ids_BP.reshape(batch, -1, 1, shape.sight.block)
    keys = k_ids_BP.reshape(batch, 1, -1, shape.sight.chunk)
    low, high, first, last = queries.min(-1), queries.max(-1), keys.min(-1), keys.max(-1)
    some = (first <= high) & (low <= last)
    every = (low == high) & (first == last) & (low == first)
    return jnp.where(every, PLAIN, jnp.where(some, MASK, SKIP)).astype(jnp.int32).reshape(-1)


def spread(shape: Shape, ids: Any, wide: Any) -> None:
    """Write the ids of keys [1, 1, keys] as [keys, lanes], one in all lanes of its sublane."""

    def some(index: Any, _: None) -> None:
        at = pl.ds(pl.multiple_of(index * LANES, LANES), LANES)
        wide[at, :] = jnp.broadcast_to(ids[0, :, at], (LANES, LANES)).T

    lax.fori_loop(0, shape.keys // LANES, some, None)


def dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    """The product over one axis of each, in float32."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, dims, precision=exact, preferred_element_type=jnp.float32)


def scores_of(shape: Shape, keys: Array, queries: Array) -> tuple[Array, Array | None]:
    """Capped scores [keys, queries] and their derivative by the plain ones, None for 1."""
    plain = dot(keys, queries, (0, 0))
    if shape.soft_cap is None:
        return plain, None
    share = jnp.tanh(plain * (1 / shape.soft_cap))
    return shape.soft_cap * share, 1 - share * share


def same_id(q_ids: Any, k_ids: Any, keys: Any, piece: Piece) -> Array:
    """Whether keys and queries have one id, [keys, queries]; `k_ids` are those of `_spread`."""
    wide = jnp.tile(k_ids[keys, :], (1, (piece.last - piece.first) // LANES))
    return wide == q_ids[0, :, piece.first : piece.last]


def masked(shape: Shape, scores: Array, offset: Any, piece: Piece, same: Array | None) -> Array:
    """Scores [keys, queries]; those that a rule or segments hide are `MASKED`."""
    seen = [] if same is None else [same]
    if piece.masked:
        keys = lax.broadcasted_iota(jnp.int32, scores.shape, 0) + (offset - piece.first)
        queries = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        seen += [keys <= queries] if piece.causal else []
        seen += [keys + shape.sight.window > queries] if piece.windowed else []
    return jnp.where(functools.reduce(jnp.logical_and, seen), scores, MASKED) if seen else scores
