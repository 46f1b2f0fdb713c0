"""RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467): x / sqrt(mean(x^2) + epsilon) * weight.

Statistics and the product with the weight are float32 whatever the input's dtype; the result has
the input's dtype.
"""

from __future__ import annotations

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray


class RmsNorm(eqx.Module):
    """Normalisation over one axis with a learnt weight, initially one.

    Attributes:
        weight: float32 [Axis].
        epsilon: added to the mean square.
    """

    weight: NamedArray
    epsilon: float = eqx.field(static=True)

    @staticmethod
    def init(Over: Axis, epsilon: float) -> RmsNorm:
        """A norm over `Over` that starts as plain normalisation."""
        return RmsNorm(hax.ones(Over, dtype=jnp.float32), epsilon)

    def __call__(self, x: NamedArray) -> NamedArray:
        """`x` normalised over the weight's axis; any other axes, axes and dtype unchanged."""
        wide = x.astype(jnp.float32)
        mean_square = hax.mean(hax.square(wide), axis=self.weight.axes)
        scaled = wide * hax.rsqrt(mean_square + self.epsilon) * self.weight.astype(jnp.float32)
        return scaled.rearrange(x.axes).astype(x.dtype)
