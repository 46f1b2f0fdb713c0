"""SwiGLU (Shazeer, 2020, arXiv:2002.05202): (silu(x gate) * (x up)) down, without biases."""

from __future__ import annotations

import equinox as eqx
import haliax as hax
import jax
from haliax import NamedArray

from models.axes import ModelAxes
from models.config import TransformerConfig
from models.initial import matrix, residual_matrix


class Mlp(eqx.Module):
    """The feed-forward half of a block.

    Attributes:
        gate: [embed, mlp].
        up: [embed, mlp].
        down: [mlp, embed].
    """

    gate: NamedArray
    up: NamedArray
    down: NamedArray

    @staticmethod
    def init(config: TransformerConfig, axes: ModelAxes, *, key: jax.Array) -> Mlp:
        """Float32 parameters."""
        gate, up, down = jax.random.split(key, 3)
        return Mlp(
            gate=matrix(gate, (axes.Embed,), (axes.Mlp,), config),
            up=matrix(up, (axes.Embed,), (axes.Mlp,), config),
            down=residual_matrix(down, (axes.Mlp,), (axes.Embed,), config),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """[batch, position, embed] to the same axes, in the parameters' dtype."""
        gate = hax.tree_checkpoint_name(hax.dot(x, self.gate, axis="embed"), "gate")
        up = hax.tree_checkpoint_name(hax.dot(x, self.up, axis="embed"), "up")
        return hax.dot(hax.nn.silu(gate) * up, self.down, axis="mlp")
