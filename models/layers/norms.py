"""RMSNorm, LayerNorm, and mixed precision, from which norms and single numbers are excepted.

RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467): x / sqrt(mean(x^2) + epsilon) * weight.
LayerNorm (Ba et al., 2016, arXiv:1607.06450): RMSNorm of x - mean(x), plus a bias.

Parameters are multiplied in the compute dtype. Statistics and weights of norms are float32 for
every input dtype: they are a ten-thousandth of the parameters, and bfloat16's spacing just above
1.0 is 1/128. So are the learnt factors of a layer, one number each.
"""

from __future__ import annotations

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import models.named as hax
from models.layers.axes import LAYERS
from models.named import Axis, NamedArray
from models.shape.config import TransformerConfig

Tree = TypeVar("Tree")


def cast(model: Tree, dtype: DTypeLike) -> Tree:
    """`model` with every named array in `dtype`, except the weights of norms and single numbers."""

    def cast_node(node: Any) -> Any:  # a Norm is a leaf, and no array
        number = isinstance(node, Norm) or all(axis.name == LAYERS for axis in node.axes)
        return node if number else node.astype(dtype)

    return jax.tree.map(cast_node, model, is_leaf=lambda node: isinstance(node, Norm | NamedArray))


class Norm(eqx.Module):
    """Normalization over one axis."""

    weight: NamedArray | None  # float32 [over], as is the bias
    bias: NamedArray | None
    over: str = eqx.field(static=True)
    centred: bool = eqx.field(static=True)  # whether to subtract the mean first (LayerNorm)
    epsilon: float = eqx.field(static=True)

    @staticmethod
    def init(Over: Axis, config: TransformerConfig) -> Norm:
        """A norm of kind `config.norm` over `Over`, with weight 1 and bias 0 where it has them."""
        centred = config.norm == "layer"
        weight = None if config.norm == "plain_rms" else hax.ones(Over, dtype=jnp.float32)
        bias = hax.zeros(Over, dtype=jnp.float32) if centred else None
        return Norm(weight, bias, Over.name, centred, config.norm_epsilon)

    def __call__(self, x: NamedArray) -> NamedArray:
        """`x` normalized over the axis `over`; axes and dtype unchanged."""
        wide = x.astype(jnp.float32)
        if self.centred:
            wide = wide - hax.mean(wide, axis=self.over)
        mean_square = hax.mean(hax.square(wide), axis=self.over)
        wide = wide * hax.rsqrt(mean_square + self.epsilon)
        if self.weight is not None:
            wide = wide * self.weight.astype(jnp.float32)
        if self.bias is not None:
            wide = wide + self.bias.astype(jnp.float32)
        return wide.rearrange(x.axes).astype(x.dtype)
