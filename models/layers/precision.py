"""Mixed precision: float32 parameters, multiplied in the compute dtype.

Parameters are created and updated in float32. `cast` returns the compute parameters of a forward
pass; differentiating through it returns float32 gradients. Norm weights stay float32: they are a
ten-thousandth of the parameters, and bfloat16's spacing just above 1.0 is 1/128.
"""

from __future__ import annotations

from typing import Any, TypeVar

import equinox as eqx
import jax
from jax.typing import DTypeLike

from models.layers.norms import Norm

Tree = TypeVar("Tree")


def cast(model: Tree, dtype: DTypeLike) -> Tree:
    """`model` with every floating-point array in `dtype`, except the weights of norms."""

    def cast_node(node: Any) -> Any:  # a Norm is a leaf, and no array
        return node.astype(dtype) if eqx.is_inexact_array(node) else node

    return jax.tree.map(cast_node, model, is_leaf=lambda node: isinstance(node, Norm))
