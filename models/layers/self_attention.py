"""The matmuls around a block's attention: projections, norms and rotation; output projection."""

from __future__ import annotations

import equinox as eqx
import jax

import models.named as hax
from models.layers.axes import (
    EMBED,
    HEAD_SIZE,
    KV_FEATURES,
    KV_HEADS,
    Q_PER_KV,
    QUERY_FEATURES,
    ModelAxes,
)
from models.layers.initialization import linear, residual_linear
from models.layers.linear import Linear
from models.layers.norms import Norm
from models.layers.rotary import rotate
from models.named import NamedArray
from models.shape.config import TransformerConfig

QUERY_AXES = (KV_HEADS, Q_PER_KV, HEAD_SIZE)
KV_AXES = (KV_HEADS, HEAD_SIZE)


class Attention(eqx.Module):
    """The parameters of grouped-query self-attention.

    The norms of queries and keys are shared by all heads (Dehghani et al., 2023, arXiv:2302.05442,
    as in Qwen3).
    """

    query: Linear  # embed to kv_heads, q_per_kv, head_size
    key: Linear  # embed to kv_heads, head_size
    value: Linear
    output: Linear  # kv_heads, q_per_kv, head_size to embed
    query_norm: Norm | None
    key_norm: Norm | None
    scale: float = eqx.field(static=True)

    @staticmethod
    def init(config: TransformerConfig, axes: ModelAxes, *, key: jax.Array) -> Attention:
        """Float32 parameters."""
        keys = jax.random.split(key, 4)
        heads = (axes.KVHeads, axes.QPerKV, axes.HeadSize)
        kv = (axes.KVHeads, axes.HeadSize)

        def norm() -> Norm | None:
            return Norm.init(axes.HeadSize, config) if config.qk_norm else None

        bias = config.qkv_biases
        return Attention(
            query=linear(keys[0], (axes.Embed,), heads, config, bias=bias),
            key=linear(keys[1], (axes.Embed,), kv, config, bias=bias),
            value=linear(keys[2], (axes.Embed,), kv, config, bias=bias),
            output=residual_linear(keys[3], heads, (axes.Embed,), config),
            query_norm=norm(),
            key_norm=norm(),
            scale=config.score_scale,
        )

    def heads(
        self, x: NamedArray, angles: NamedArray | None
    ) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Scaled queries, keys and values, normalized and rotated by their positions.

        Args:
            x: embed and other axes, in any order.
            angles: rotary angles with the axis head_size / 2 and otherwise only axes of `x`; None
                with learned positions.

        Returns:
            Queries [..., kv_heads, q_per_kv, head_size], keys and values [..., kv_heads,
            head_size], in the parameters' dtype.
        """
        q, k, v = self._projections(x)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if angles is None:
            return q * self.scale, k, v
        return rotate(q, angles, self.scale), rotate(k, angles), v

    def merge(self, out: NamedArray, x: NamedArray) -> NamedArray:
        """The output projection of attention's result, with the axes of `x`."""
        order = tuple(QUERY_FEATURES if a.name == EMBED else a.name for a in x.axes)
        out = out.flatten_axes(QUERY_AXES, QUERY_FEATURES).rearrange(order)
        merged = self.output.flattened(QUERY_AXES, QUERY_FEATURES)
        projected = merged(out, QUERY_FEATURES, EMBED)
        return hax.tree_checkpoint_name(projected, "attention_output")

    def _projections(self, x: NamedArray) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Queries, keys and values with the axes of `x`, "embed" replaced by head axes.

        The matmuls, and the values saved for the backward pass, have all features in one axis:
        separate heads of 64 would be padded to the TPU's 128 lanes.
        """

        def project(linear: Linear, names: tuple[str, ...], merged: str, name: str) -> NamedArray:
            flat = linear.flattened(names, merged)(x, EMBED, merged)
            flat = hax.tree_checkpoint_name(flat, name)
            axes = tuple(linear.matrix.resolve_axis(axis) for axis in names)
            return flat.unflatten_axis(merged, axes)

        return (
            project(self.query, QUERY_AXES, QUERY_FEATURES, "queries"),
            project(self.key, KV_AXES, KV_FEATURES, "keys"),
            project(self.value, KV_AXES, KV_FEATURES, "values"),
        )
