"""A matrix between named axes: its matmul, its bias, and its initial values.

Features first, [features, batch, position], is for TPUs. The gradient of a matrix contracts over
all tokens, which TPUs compute with tokens in the last axis; with tokens first, the compiler copies
every wide activation into the other layout in the backward pass. Tokens first, [batch, position,
features], is for other devices and has a backward pass of its own: JAX's reads the cotangent
transposed, which a CPU's compiler fuses with the cotangent's producer into a copy that takes longer
than the matmul. Ours transposes the narrower operand: `tests.bench.cpu_training` takes two thirds
of the processor time.

Matrices are drawn from a normal distribution of standard deviation 1/sqrt(fan_in), truncated at
three of them (LeCun et al., 1998, "Efficient BackProp", section 4.6). The two of a block that write
to the residual stream are divided by sqrt(2 * layers), so that the stream's variance does not grow
with depth (GPT-2, Radford et al., 2019, section 2.3), or are zero with `zero_outputs`. The
embedding and an untied head have small fixed standard deviations (0.02 in GPT-2 and Llama), so
that the first loss is near log(vocab).
"""

from __future__ import annotations

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import models.named as hax
from models.layers.axes import ModelAxes
from models.named import Axis, NamedArray
from models.shape.config import TransformerConfig


@jax.custom_vjp
def _tokens_first(x: Array, matrix: Array) -> Array:
    """x [..., in] @ matrix [in, out], with the backward pass of the module docstring."""
    return jnp.dot(x, matrix)


def _forward(x: Array, matrix: Array) -> tuple[Array, tuple[Array, Array]]:
    return jnp.dot(x, matrix), (x, matrix)


def _backward(residuals: tuple[Array, Array], y_bar: Array) -> tuple[Array, Array]:
    x, matrix = residuals
    x_bar = jnp.einsum("...o,io->...i", y_bar, matrix)
    # Both compute x^T y_bar over all tokens; the narrower operand is the transposed, left one.
    if x.shape[-1] <= y_bar.shape[-1]:
        return x_bar, jnp.einsum("...i,...o->io", x, y_bar)
    return x_bar, jnp.einsum("...o,...i->oi", y_bar, x).T


_tokens_first.defvjp(_forward, _backward)


CUT = 3.0

Axes = tuple[Axis, ...]


def truncated(key: jax.Array, axes: Axes, std: float) -> NamedArray:
    """Float32 samples of a normal distribution times `std`, truncated at `CUT` * `std`."""
    return hax.truncated_normal(key, axes, -CUT, CUT, dtype=jnp.float32) * std


def per_layer(ends: tuple[float, float] | None, axes: ModelAxes) -> NamedArray | None:
    """Float32 [layers], linear from the first layer's number to the last one's; None for None."""
    if ends is None:
        return None
    return hax.named(jnp.asarray(np.linspace(*ends, axes.Layers.size), jnp.float32), axes.Layers)


def linear(
    key: jax.Array,
    In: Axes,
    Out: Axes,
    config: TransformerConfig,
    *,
    bias: bool = False,
    scale: float = 1.0,
) -> Linear:
    """A matrix from `In` to `Out` at `scale` * init_scale / sqrt(fan_in); a bias is zero."""
    fan_in = math.prod(axis.size for axis in In)
    matrix = truncated(key, (*In, *Out), scale * config.init_scale / math.sqrt(fan_in))
    return Linear(matrix, hax.zeros(Out) if config.biases or bias else None)


def residual_linear(key: jax.Array, In: Axes, Out: Axes, config: TransformerConfig) -> Linear:
    """A matrix that writes to the residual stream: `linear` / sqrt(2 * layers), or zero."""
    made = linear(key, In, Out, config)
    scale = 0.0 if config.zero_outputs else 1 / math.sqrt(2 * config.layers)
    return Linear(made.matrix * scale, made.bias)


class Linear(eqx.Module):
    """x @ matrix + bias, with matrix [in axes..., out axes...] and bias [out axes...] or None."""

    matrix: NamedArray
    bias: NamedArray | None

    def __call__(self, x: NamedArray, axis: str, out: str) -> NamedArray:
        """`x` with `out` in the place of `axis`; these are the matrix's axes, see `flattened`."""
        if x.axes[-1].name == axis:
            matrix = self.matrix.rearrange((axis, out))
            y = hax.named(_tokens_first(x.array, matrix.array), (*x.axes[:-1], matrix.axes[-1]))
        else:
            y = hax.dot(self.matrix, x, axis=axis)
            y = y.rearrange(tuple(out if a.name == axis else a.name for a in x.axes))
        if self.bias is None:
            return y
        # In float32, as then is the sum over all tokens that is the bias's gradient.
        wide = y.astype(jnp.float32) + self.bias.astype(jnp.float32)
        return wide.rearrange(y.axes).astype(y.dtype)

    def flattened(self, axes: tuple[str, ...], name: str) -> Linear:
        """The same linear map with `axes` merged into one axis `name`, the first one outermost.

        With heads of 64 as the last axis a result would be padded to the TPU's 128 lanes.
        """

        def flatten(array: NamedArray) -> NamedArray:
            present = tuple(axis for axis in axes if axis in (a.name for a in array.axes))
            return array.flatten_axes(present, name) if present else array

        return Linear(flatten(self.matrix), None if self.bias is None else flatten(self.bias))
