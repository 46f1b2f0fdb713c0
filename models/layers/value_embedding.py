"""Value embeddings: rows of a table for the tokens, added to the values of some layers.

    v = v + 3 * sigmoid(gate(x)) * table[token]

with a table per layer, and a gate per key/value head that reads the first `GATE_INPUTS` features of
the block's normalized input x (nanochat, https://github.com/karpathy/nanochat; mixing values with
an early layer's is by Zhou et al., 2024, arXiv:2410.17897). The tables of all layers are one array,
so that one gather and one scatter-add serve a batch; accelerators are slow at both. A KV cache
holds the sums.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

import models.named as hax
from models.layers.axes import (
    BATCH,
    EMBED,
    GATE,
    HEAD_SIZE,
    KV_FEATURES,
    KV_HEADS,
    LAYERS,
    VOCAB,
    MeshAxes,
    ModelAxes,
)
from models.layers.embedding import look_up
from models.named import Axis, NamedArray
from models.shape.config import GATE_INPUTS, TransformerConfig

Values = tuple[NamedArray | None, NamedArray | None]
"""Rows and gates, of all layers that have them or of one; None for those without."""
NO_VALUES: Values = (None, None)


def tables_and_gates(key: jax.Array, config: TransformerConfig, axes: ModelAxes) -> Values:
    """Float32 [vocab, kv_heads, layers, head_size] and [layers, gate_inputs, kv_heads], if any.

    "layers" are those with a table. As nanochat's, tables have the standard deviation of a matrix
    of values, and gates are slightly above the neutral 1.5; both distributions are uniform.
    """
    if not any(config.value_layers):
        return NO_VALUES
    Layers = Axis(LAYERS, sum(config.value_layers))
    Inputs = Axis(GATE, min(GATE_INPUTS, axes.Embed.size))
    of_tables, of_gates = jax.random.split(jax.random.fold_in(key, 2))
    bound = config.init_scale * math.sqrt(3 / axes.Embed.size)
    table = (axes.Vocab, axes.KVHeads, Layers, axes.HeadSize)
    return (
        hax.uniform(of_tables, table, dtype=jnp.float32, minval=-bound, maxval=bound),
        hax.uniform(of_gates, (Layers, Inputs, axes.KVHeads), dtype=jnp.float32, maxval=0.02),
    )


def rows_of(
    table: NamedArray, tokens: NamedArray, order: tuple[str, ...], mesh_axes: MeshAxes | None
) -> NamedArray:
    """Rows of int32 tokens [batch, ...]: "layers", then the axes in `order`.

    "embed" stands for the features of all heads, which are one axis as in `Linear.flattened`.
    """
    tokens = tokens.rearrange((BATCH, ...))
    table = table.rearrange((VOCAB, KV_HEADS, LAYERS, HEAD_SIZE))
    if mesh_axes is not None:  # whatever splits the heads, ids are free to be split by others
        mesh_axes = dataclasses.replace(mesh_axes, heads=())
    rows = look_up(table.array.reshape(len(table.array), -1), tokens.array, mesh_axes)
    rows = rows.reshape(*tokens.array.shape, *table.array.shape[1:])
    found = hax.named(rows, (*tokens.axes, *table.axes[1:]))
    found = found.rearrange((LAYERS, ..., KV_HEADS, HEAD_SIZE))
    found = found.flatten_axes((KV_HEADS, HEAD_SIZE), KV_FEATURES)
    axes = (LAYERS, *(KV_FEATURES if name == EMBED else name for name in order))
    return hax.auto_sharded(found.rearrange(axes))


def add_rows(v: NamedArray, x: NamedArray, values: Values) -> NamedArray:
    """Values `v` plus a layer's gated rows, if it has a table; with the axes and dtype of `v`.

    `v` has the axes kv_heads, head_size and those of `x` but embed, rows likewise, with the first
    two as kv_features; the gate is [gate_inputs, kv_heads].
    """
    rows, gate = values
    if rows is None or gate is None:
        return v
    inputs = x[EMBED, : gate.resolve_axis(GATE).size].rename({EMBED: GATE}).astype(jnp.float32)
    weights = 3.0 * hax.sigmoid(hax.dot(inputs, gate.astype(jnp.float32), axis=GATE))
    rows = rows.unflatten_axis(KV_FEATURES, (v.resolve_axis(KV_HEADS), v.resolve_axis(HEAD_SIZE)))
    wide = v.astype(jnp.float32) + rows.astype(jnp.float32).rearrange(v.axes) * weights
    return wide.rearrange(v.axes).astype(v.dtype)
