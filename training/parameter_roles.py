"""The role of each parameter of a model, and which of them are matrices."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import jax

import models.named as hax
from models.layers.axes import EMBED, LAYERS
from training.config.optimizer import ROLES, Role
from training.sharding.layout import is_named

# An array holds independent matrices along these axes. Two projections fused along any other axis
# are one matrix to Muon.
STACKED = (LAYERS,)

# A parameter with one of these words in its name does not multiply activations as a matrix, however
# many axes it has: it is a table of rows, or has one number per head and feature.
NOT_MATRICES = ("embedding", "bias", "norm")


def is_matrix(path: tuple[Any, ...], leaf: Any, other: Collection[str] = NOT_MATRICES) -> bool:
    """Whether a parameter has two or more axes besides "layers" and no `other` word in its name."""
    if not is_named(leaf):
        return False
    name = jax.tree_util.keystr(path).lower()
    return len(_sides(leaf)) >= 2 and not any(word in name for word in other)


def is_block_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
    """Whether a parameter is a matrix of a block with "embed" as its input or output."""
    if not is_matrix(path, leaf):
        return False
    names = {axis.name for axis in leaf.axes}
    return LAYERS in names and EMBED in names


def matrix_axes(array: hax.NamedArray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the input axes (contracted with activations) and of the output axes of a matrix.

    "embed" is one side, and all other axes except the stacked ones are the other side. Parameters
    have their input axes first, so the first side is the input.
    """
    sides = _sides(array)
    names = [array.axes[i].name for i in sides]
    assert EMBED in (names[0], names[-1]), f"embed is inside {names}: not inputs first"
    embed = names.index(EMBED)
    others = tuple(i for i in sides if i != sides[embed])
    if embed == 0:
        return (sides[0],), others
    return others, (sides[embed],)


def role_of(path: tuple[Any, ...], leaf: Any) -> Role:
    """The role of a parameter, by the names on its path; gates of value embeddings are vectors."""
    words = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
    matrix = is_block_matrix(path, leaf) and "value_gate" not in words
    words = ["embedding" if word == "position_embedding" else word for word in words]
    return next((role for role in ROLES if role in words), "matrices" if matrix else "vectors")


def decay_mask(model: Any, *, tables: bool = False) -> Any:
    """True where weight decay applies, one bool per named parameter of `model`.

    It applies to matrices: parameters with at least two axes besides "layers"; not to norms, biases
    and embeddings, unless `tables`: a rare token's row gets a notable gradient only when the token
    occurs, and decay would shrink it in between. `TrainConfig.z_loss` bounds the logits instead.
    """
    other = [word for word in NOT_MATRICES if not (tables and word == "embedding")]
    decays = functools.partial(is_matrix, other=other)
    return jax.tree_util.tree_map_with_path(decays, model, is_leaf=is_named)


def _sides(array: hax.NamedArray) -> list[int]:
    return [i for i, axis in enumerate(array.axes) if axis.name not in STACKED]
