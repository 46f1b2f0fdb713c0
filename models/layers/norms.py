"""RMSNorm and LayerNorm.

RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467): x / sqrt(mean(x^2) + epsilon) * weight.
LayerNorm (Ba et al., 2016, arXiv:1607.06450): RMSNorm of x - mean(x), plus a bias.

Statistics and the multiplication by the weight are float32 for every input dtype; the result has
the input's dtype.
"""

from __future__ import annotations

import equinox as eqx
import jax.numpy as jnp

import models.named as hax
from models.named import Axis, NamedArray
from models.shape.config import TransformerConfig


class Norm(eqx.Module):
    """Normalization over one axis.

    Attributes:
        weight: float32 [over], initially one; None for no weight.
        bias: float32 [over], initially zero; None for no bias.
        over: name of the axis.
        centred: whether to subtract the mean first (LayerNorm).
        epsilon: added to the mean square.
    """

    weight: NamedArray | None
    bias: NamedArray | None
    over: str = eqx.field(static=True)
    centred: bool = eqx.field(static=True)
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
