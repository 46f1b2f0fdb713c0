"""Which parameters Muon is for, and as what matrices it sees them.

Muon moves a matrix along its momentum with all singular values brought near 1
(https://kellerjordan.github.io/posts/muon). The method is `optax.contrib.scale_by_muon`; here is
only what it must know about our named arrays: every layer of a stacked array is a matrix of its
own, and the several axes of a projection's heads are one side of it.

Two differences to Jordan's code are optax's: the momentum and the Nesterov term are divided by
Adam's bias correction, which changes their proportion in the first steps, and the iteration runs in
the gradient's dtype, float32 here.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import haliax as hax
import jax
import optax
from optax.contrib import MuonDimensionNumbers

from models.axes import EMBED, LAYERS
from training.config import OptimizerConfig
from training.sharding.layout import is_named

# Along these axes an array holds independent matrices. Two projections fused along any other axis
# are one matrix to Muon.
STACKED = (LAYERS,)

# What has one of these words in its name is not a matrix that multiplies activations, however many
# axes it has: rows of a table, or one number per head and feature.
NOT_MATRICES = ("embedding", "bias", "norm")


def is_matrix(path: tuple[Any, ...], leaf: Any, other: Collection[str] = NOT_MATRICES) -> bool:
    """Whether a parameter is a matrix by its axes, two or more beside "layers", and its name,
    which holds none of the `other` words."""
    if not is_named(leaf):
        return False
    name = jax.tree_util.keystr(path).lower()
    return len(_sides(leaf)) >= 2 and not any(word in name for word in other)


def is_block_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
    """Whether a parameter is a matrix of a block that reads or writes "embed"."""
    if not is_matrix(path, leaf):
        return False
    names = {axis.name for axis in leaf.axes}
    return LAYERS in names and EMBED in names


def matrix_axes(array: hax.NamedArray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of the input axes (contracted with activations) and the output axes of a matrix.

    "embed" is one side and all other axes but stacked ones are the other. Parameters are written
    inputs first, so the side that stands first is the input.
    """
    sides = _sides(array)
    names = [array.axes[i].name for i in sides]
    assert EMBED in (names[0], names[-1]), f"embed is inside {names}: not inputs first"
    embed = names.index(EMBED)
    others = tuple(i for i in sides if i != sides[embed])
    if embed == 0:
        return (sides[0],), others
    return others, (sides[embed],)


def labels(tree: Any) -> Any:
    """The optimizer of every parameter of a model (or of its gradients), "muon" or "adamw"."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: "muon" if is_block_matrix(path, leaf) else "adamw",
        tree,
        is_leaf=is_named,
    )


def directions(config: OptimizerConfig) -> optax.GradientTransformation:
    """Gradients of block matrices to scaled orthogonal directions, before decay and rate."""
    orthogonal = optax.contrib.scale_by_muon(
        ns_steps=config.muon_steps,
        beta=config.muon_momentum,
        nesterov=config.muon_nesterov,
        weight_dimension_numbers=_all_dimension_numbers,
    )

    def scale(updates: Any, _: Any) -> Any:
        return jax.tree.map(
            lambda leaf: leaf * shape_factor(leaf, config.muon_rms), updates, is_leaf=is_named
        )

    return optax.chain(orthogonal, optax.stateless(scale))


def shape_factor(array: hax.NamedArray, rms: float | None) -> float:
    """What a direction with singular values of 1 is multiplied by, see `OptimizerConfig.muon_rms`.

    `optax.contrib.muon` does the same, by a function that is not public.
    """
    fan_in, fan_out = (math.prod(array.axes[i].size for i in side) for side in matrix_axes(array))
    if rms is None:
        return math.sqrt(max(1.0, fan_out / fan_in))
    return rms * math.sqrt(max(fan_in, fan_out))


def _sides(array: hax.NamedArray) -> list[int]:
    return [i for i, axis in enumerate(array.axes) if axis.name not in STACKED]


def _all_dimension_numbers(tree: Any) -> Any:
    """Dimension numbers in place of every array inside the named arrays of `tree`."""

    def inside(leaf: hax.NamedArray) -> Any:
        numbers = MuonDimensionNumbers(*matrix_axes(leaf))
        return jax.tree.map(lambda _: numbers, leaf)

    return jax.tree.map(inside, tree, is_leaf=is_named)
