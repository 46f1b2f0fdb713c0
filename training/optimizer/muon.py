"""Selects the parameters that Muon updates, and gives the matrix dimensions of each.

Muon updates a matrix by its momentum after orthogonalization: Newton-Schulz iterations bring all
singular values near 1 (https://kellerjordan.github.io/posts/muon). `optax.contrib.scale_by_muon`
implements it; this module describes our named arrays to it: each layer of a stacked array is a
matrix of its own, and all head axes of a projection together are one side of the matrix.

optax differs from Jordan's code in two points: it divides the momentum and the Nesterov term by
Adam's bias correction, which changes their ratio in the first steps, and it runs the iteration in
the gradient's dtype, here float32.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

import models.named as hax
from models.layers.axes import EMBED, LAYERS
from training.config import OptimizerConfig
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


def labels(tree: Any) -> Any:
    """The optimizer of each parameter of a model (or of its gradients), "muon" or "adamw"."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: "muon" if is_block_matrix(path, leaf) else "adamw",
        tree,
        is_leaf=is_named,
    )


def directions(config: OptimizerConfig) -> optax.GradientTransformation:
    """Gradients of block matrices -> scaled orthogonal directions, before decay and rate."""
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
    """The factor for a direction with singular values of 1, see `OptimizerConfig.muon_rms`.

    `optax.contrib.muon` computes the same factor in a private function.
    """
    fan_in, fan_out = (math.prod(array.axes[i].size for i in side) for side in matrix_axes(array))
    if rms is None:
        return math.sqrt(max(1.0, fan_out / fan_in))
    # An orthogonal m x n matrix has the squared norm min(m, n), so its RMS is 1 / sqrt(max(m, n)).
    return rms * math.sqrt(max(fan_in, fan_out))


def _sides(array: hax.NamedArray) -> list[int]:
    return [i for i, axis in enumerate(array.axes) if axis.name not in STACKED]


def _all_dimension_numbers(tree: Any) -> Any:
    """`tree` with dimension numbers in place of the array inside each named array."""

    def inside(leaf: hax.NamedArray) -> Any:
        numbers = MuonDimensionNumbers(*matrix_axes(leaf))
        return jax.tree.map(lambda _: numbers, leaf)

    return jax.tree.map(inside, tree, is_leaf=is_named)
