"""The two halves of a block: the matmuls around attention with rotary positions, and the MLP.

Rotary embedding (Su et al., 2021, arXiv:2104.09864), half-split as in Llama: feature i of both
halves is a pair, rotated by position * base^(-2i / head_size). Angles and the rotation are float32:
bfloat16 cannot represent every position above 256. Angles are traced, because constants for every
position would enlarge the program.

MLP: "swiglu" (Shazeer, 2020, arXiv:2002.05202) is (silu(x gate) * (x up)) down; "relu2" (So et al.,
2021, arXiv:2109.08668) is relu(x up)^2 down; "relu" and "gelu" (tanh form, as in GPT-2) likewise.
"""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import models.named as hax
from models.layers.axes import (
    EMBED,
    HEAD_SIZE,
    KV_FEATURES,
    KV_HEADS,
    MLP,
    Q_PER_KV,
    QUERY_FEATURES,
    ModelAxes,
)
from models.layers.linear import Linear, linear, residual_linear
from models.layers.norms import Norm
from models.named import Axis, NamedArray
from models.shape.config import RopeScaling, TransformerConfig, YarnScaling


def rotary_angles(
    positions: Axis | NamedArray,
    HeadSize: Axis,
    base: float,
    scaling: RopeScaling | YarnScaling | None = None,
) -> NamedArray:
    """Radians, float32 [head_size / 2, ...] with the axes of `positions`, or an axis's indices."""
    Half = HeadSize.resize(HeadSize.size // 2)
    values = frequencies(HeadSize.size, base, scaling).astype(np.float32)
    frequency = hax.named(jnp.asarray(values), Half)
    if isinstance(positions, Axis):
        return frequency.broadcast_to((Half, positions)) * hax.arange(positions, dtype=jnp.float32)
    return frequency.broadcast_to((Half, *positions.axes)) * positions.astype(jnp.float32)


def frequencies(
    size: int, base: float, scaling: RopeScaling | YarnScaling | None = None
) -> np.ndarray:
    """Radians per position, float64 [size / 2]; their only error is the later cast to float32."""
    plain = base ** (-2.0 * np.arange(size // 2) / size)
    if isinstance(scaling, RopeScaling):
        return _llama3(plain, scaling)
    return plain if scaling is None else _yarn(plain, base, scaling)


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Interpolate between each frequency and its `factor`-th by the rotations per context."""
    turns = plain * (scaling.original_context / (2 * math.pi))
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    keep = np.clip((turns - scaling.low_frequency_factor) / span, 0.0, 1.0)
    return plain * (keep + (1.0 - keep) / scaling.factor)


def _yarn(plain: np.ndarray, base: float, scaling: YarnScaling) -> np.ndarray:
    """Interpolate between each frequency and its `factor`-th by the index of its feature pair."""
    size = 2 * len(plain)

    def pair(turns: float) -> float:
        """The fractional index i with base^(2i / size) = wavelength / (2 pi)."""
        wavelength = scaling.original_context / turns
        return size * math.log(wavelength / (2 * math.pi)) / (2 * math.log(base))

    # Whole pairs, clamped as in the released code.
    low = max(math.floor(pair(scaling.beta_fast)), 0)
    high = min(math.ceil(pair(scaling.beta_slow)), size - 1)
    slower = np.clip((np.arange(len(plain)) - low) / max(high - low, 0.001), 0.0, 1.0)
    return plain * (1.0 - slower + slower / scaling.factor)


def rotate(x: NamedArray, angles: NamedArray, scale: float = 1.0) -> NamedArray:
    """`x` [..., position, ..., head_size] rotated by `angles`, times `scale`; dtype unchanged."""
    HeadSize = x.resolve_axis(HEAD_SIZE)
    half = HeadSize.size // 2
    wide = x.astype(jnp.float32)
    first = wide[HeadSize, :half]
    second = wide[HeadSize, half:]
    cos, sin = hax.cos(angles) * scale, hax.sin(angles) * scale
    rotated = hax.concatenate(HeadSize, [first * cos - second * sin, second * cos + first * sin])
    return rotated.rearrange(x.axes).astype(x.dtype)


def mixed(
    x: NamedArray, start: NamedArray | None, of_x: NamedArray | None, of_start: NamedArray | None
) -> NamedArray:
    """of_x * x + of_start * start with learnt scalars, in float32; None is 1 for x and 0 for start.

    The axes, in their order, and the dtype are those of `x`.
    """
    if of_x is None and of_start is None:
        return x
    wide = x.astype(jnp.float32) if of_x is None else x.astype(jnp.float32) * of_x
    if start is not None and of_start is not None:
        wide = wide + start.astype(jnp.float32) * of_start
    return hax.auto_sharded(wide.rearrange(x.axes).astype(x.dtype))


QUERY_AXES = (KV_HEADS, Q_PER_KV, HEAD_SIZE)
KV_AXES = (KV_HEADS, HEAD_SIZE)


class Attention(eqx.Module):
    """Grouped-query self-attention; all heads share the norms of queries and keys.

    QK-norm: Dehghani et al., 2023, arXiv:2302.05442, as in Qwen3.
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
        keys = jax.random.split(key, 4)
        heads = (axes.KVHeads, axes.QPerKV, axes.HeadSize)
        kv = (axes.KVHeads, axes.HeadSize)

        bias, normed = config.qkv_biases, config.qk_norm
        return Attention(
            query=linear(keys[0], (axes.Embed,), heads, config, bias=bias),
            key=linear(keys[1], (axes.Embed,), kv, config, bias=bias),
            value=linear(keys[2], (axes.Embed,), kv, config, bias=bias),
            output=residual_linear(keys[3], heads, (axes.Embed,), config),
            query_norm=Norm.init(axes.HeadSize, config) if normed else None,
            key_norm=Norm.init(axes.HeadSize, config) if normed else None,
            scale=config.score_scale,
        )

    def heads(
        self, x: NamedArray, angles: NamedArray | None
    ) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Scaled queries, keys and values, normalized and rotated by their positions.

        `x` has embed and other axes, in any order; `angles` are those of `rotary_angles`, None with
        learned positions. Queries are [..., kv_heads, q_per_kv, head_size], keys and values [...,
        kv_heads, head_size].
        """

        def project(linear: Linear, names: tuple[str, ...], merged: str, name: str) -> NamedArray:
            flat = linear.flattened(names, merged)(x, EMBED, merged)
            flat = hax.tree_checkpoint_name(flat, name)
            axes = tuple(linear.matrix.resolve_axis(axis) for axis in names)
            return flat.unflatten_axis(merged, axes)

        q = project(self.query, QUERY_AXES, QUERY_FEATURES, "queries")
        k = project(self.key, KV_AXES, KV_FEATURES, "keys")
        v = project(self.value, KV_AXES, KV_FEATURES, "values")
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


class Mlp(eqx.Module):
    """Up projection, activation, down projection; with a gate for "swiglu"."""

    gate: Linear | None
    up: Linear
    down: Linear
    kind: str = eqx.field(static=True)

    @staticmethod
    def init(config: TransformerConfig, axes: ModelAxes, *, key: jax.Array) -> Mlp:
        gate, up, down = jax.random.split(key, 3)
        wide, scale = ((axes.Embed,), (axes.Mlp,), config), config.mlp_init_scale
        return Mlp(
            gate=linear(gate, *wide, scale=scale) if config.mlp_kind == "swiglu" else None,
            up=linear(up, *wide, scale=scale),
            down=residual_linear(down, (axes.Mlp,), (axes.Embed,), config),
            kind=config.mlp_kind,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """The MLP's output with the axes of `x`, in their order, in the parameters' dtype."""
        up = hax.tree_checkpoint_name(self.up(x, EMBED, MLP), "up")
        if self.gate is not None:
            gate = hax.tree_checkpoint_name(self.gate(x, EMBED, MLP), "gate")
            up = hax.silu(gate) * up
        elif self.kind == "gelu":
            up = hax.gelu(up, approximate=True)
        else:
            positive = hax.maximum(up, 0)
            up = positive * positive if self.kind == "relu2" else positive
        return self.down(up, MLP, EMBED)
