"""The feed-forward half of a block.

"swiglu" (Shazeer, 2020, arXiv:2002.05202) is (silu(x gate) * (x up)) down; "relu2" (So et al.,
2021, arXiv:2109.08668) is relu(x up)^2 down; "relu" and "gelu" (tanh form, as in GPT-2) likewise.
"""

from __future__ import annotations

import equinox as eqx
import jax

import models.named as hax
from models.layers.axes import EMBED, MLP, ModelAxes
from models.layers.initialization import linear, residual_linear
from models.layers.linear import Linear
from models.named import NamedArray
from models.shape.config import TransformerConfig


class Mlp(eqx.Module):
    """Up projection, activation, down projection; with a gate for "swiglu"."""

    gate: Linear | None
    up: Linear
    down: Linear
    kind: str = eqx.field(static=True)

    @staticmethod
    def init(config: TransformerConfig, axes: ModelAxes, *, key: jax.Array) -> Mlp:
        """Float32 parameters."""
        gate, up, down = jax.random.split(key, 3)
        wide = ((axes.Embed,), (axes.Mlp,), config)
        return Mlp(
            gate=linear(gate, *wide) if config.mlp_kind == "swiglu" else None,
            up=linear(up, *wide),
            down=residual_linear(down, (axes.Mlp,), (axes.Embed,), config),
            kind=config.mlp_kind,
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """The MLP's output with the axes of `x`, in their order, in the parameters' dtype."""
        up = hax.tree_checkpoint_name(self.up(x, EMBED, MLP), "up")
        if self.gate is not None:
            gate = hax.tree_checkpoint_name(self.gate(x, EMBED, MLP), "gate")
            return self.down(hax.silu(gate) * up, MLP, EMBED)
        return self.down(_activation(self.kind, up), MLP, EMBED)


def _activation(kind: str, up: NamedArray) -> NamedArray:
    if kind == "gelu":
        return hax.gelu(up, approximate=True)
    positive = hax.maximum(up, 0)
    return positive * positive if kind == "relu2" else positive
