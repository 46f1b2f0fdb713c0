"""A tree of arrays as a flat dict from stable names to arrays, and back.

A name is the attribute path ("model.blocks.attention.query.weight"). A checkpoint describes its
arrays by name, axes, shape and dtype: two trees match if and only if these are equal for every
array. Nothing depends on how a class is pickled or registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from training.sharding.layout import is_named


def flatten(tree: Any) -> dict[str, jax.Array]:
    """Arrays (concrete or abstract) of `tree` by name, in the tree's order."""
    return {name: _array(leaf) for name, leaf in _named_leaves(tree)}


def describe(tree: Any) -> dict[str, dict[str, Any]]:
    """Axes (None for a plain array), shape and dtype of every array, as JSON values."""
    return {
        name: {
            "axes": [axis.name for axis in leaf.axes] if is_named(leaf) else None,
            "shape": list(_array(leaf).shape),
            "dtype": str(_array(leaf).dtype),
        }
        for name, leaf in _named_leaves(tree)
    }


def unflatten(like: Any, arrays: dict[str, jax.Array]) -> Any:
    """A tree with the structure of `like` and the leaves `arrays`."""
    assert list(arrays) == list(flatten(like)), "names differ from the tree's"
    return jax.tree.unflatten(jax.tree.structure(like), list(arrays.values()))


def mismatch(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """A message about the first array whose entry in an index is not as `describe` wants it."""
    for name in wanted:
        if name not in stored:
            return f"array {name!r} is missing"
    for name in stored:
        if name not in wanted:
            return f"array {name!r} is not part of this model"
    for name, want in wanted.items():
        if any(stored[name][field] != value for field, value in want.items()):
            return f"array {name!r} is {_show(stored[name])}, this model needs {_show(want)}"
    return None


def _show(entry: Mapping[str, Any]) -> str:
    axes = entry["axes"] or [""] * len(entry["shape"])
    sizes = ", ".join(f"{a} {n}".strip() for a, n in zip(axes, entry["shape"], strict=True))
    return f"{entry['dtype']}[{sizes}]"


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def _array(leaf: Any) -> jax.Array:
    return leaf.array if is_named(leaf) else leaf
