"""Initial values of matrices.

Matrices are drawn from a normal distribution of standard deviation 1/sqrt(fan_in), truncated at
three of them (LeCun et al., 1998, "Efficient BackProp", section 4.6), so that the scale of
activations does not depend on the width. The two matrices of a block that write to the residual
stream are divided by sqrt(2 * layers), so that the stream's variance does not grow with depth
(GPT-2, Radford et al., 2019, section 2.3), or are zero with `zero_outputs`. The embedding and an
untied head have a small fixed standard deviation (0.02 in GPT-2 and Llama), so that the first
logits are near zero and the first loss is near log(vocab).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

import models.named as hax
from models.layers.linear import Linear
from models.named import Axis, NamedArray
from models.shape.config import TransformerConfig

CUT = 3.0

Axes = tuple[Axis, ...]


def truncated(key: jax.Array, axes: Axes, std: float) -> NamedArray:
    """Float32 samples of a normal distribution times `std`, truncated at `CUT` * `std`."""
    return hax.truncated_normal(key, axes, -CUT, CUT, dtype=jnp.float32) * std


def linear(
    key: jax.Array, In: Axes, Out: Axes, config: TransformerConfig, *, bias: bool = False
) -> Linear:
    """A matrix from `In` to `Out` at init_scale / sqrt(fan_in), with a zero bias if configured."""
    fan_in = math.prod(axis.size for axis in In)
    matrix = truncated(key, (*In, *Out), config.init_scale / math.sqrt(fan_in))
    return Linear(matrix, hax.zeros(Out) if config.biases or bias else None)


def residual_linear(key: jax.Array, In: Axes, Out: Axes, config: TransformerConfig) -> Linear:
    """A matrix that writes to the residual stream: `linear` / sqrt(2 * layers), or zero."""
    made = linear(key, In, Out, config)
    scale = 0.0 if config.zero_outputs else 1 / math.sqrt(2 * config.layers)
    return Linear(made.matrix * scale, made.bias)
