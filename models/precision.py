"""Which numbers have which type: stored in float32, multiplied in the dtype of `cast`.

Parameters are created and updated in float32. `cast` makes the copy that a forward pass multiplies
with; differentiating through it returns float32 gradients. Norm weights stay float32: they are a
ten-thousandth of the parameters, and near 1.0 bfloat16 has steps of 1/128.
"""

from __future__ import annotations

from typing import Any, TypeVar

import equinox as eqx
import jax
from jax.typing import DTypeLike

from models.norms import Norm

Tree = TypeVar("Tree")


def cast(model: Tree, dtype: DTypeLike) -> Tree:
    """`model` with every floating-point array in `dtype`, except the weights of norms."""

    def cast_node(node: Any) -> Any:
        if eqx.is_inexact_array(node):
            return node.astype(dtype)
        return node

    return jax.tree.map(cast_node, model, is_leaf=lambda node: isinstance(node, Norm))
