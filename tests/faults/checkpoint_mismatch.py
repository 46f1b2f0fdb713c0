"""Fault 33: a sound checkpoint, and a model that is not quite the one that was saved.

Every array of the tiny model's state in turn is missing, surplus, of another size, dtype, order of
axes or vocabulary. Each is an `InputError` that names the array: nothing is cast, padded or made
anew, and no older checkpoint is taken instead.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import models.named as hax
from pipeline.errors import InputError
from tests.faults.registry import Fault, pick, trials
from tests.training import tiny
from training.checkpoint import tree_names
from training.checkpoint.checkpointer import Checkpointer
from training.checkpoint.restore import newest_sound
from training.sharding.layout import is_named

KINDS = ("missing", "surplus", "size", "dtype", "axes", "vocabulary")


def flat(tree: Any) -> dict[str, Any]:
    """Named arrays of a tree by name, as a tree."""
    found = jax.tree.leaves(tree, is_leaf=is_named)
    return dict(zip(tree_names.flatten(tree), found, strict=True))


def changed(kind: str, name: str, like: dict[str, Any]) -> dict[str, Any]:
    """`like` with one array that is not what was saved; itself where the kind does not apply."""
    leaf = like[name]
    array = leaf.array if is_named(leaf) else leaf
    axes = leaf.axes if is_named(leaf) else ()

    def put(shape: tuple[int, ...], dtype: Any, axes: tuple[Any, ...]) -> dict[str, Any]:
        # Copied to every device, for the size need not be divisible.
        sharding = jax.sharding.NamedSharding(array.sharding.mesh, jax.sharding.PartitionSpec())
        new: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        return like | {name: hax.NamedArray(new, axes) if is_named(leaf) else new}

    if kind == "missing":
        return {other: entry for other, entry in like.items() if other != name}
    if kind == "surplus":
        return like | {f"{name}.more": leaf}
    if kind == "dtype":
        other = jnp.bfloat16 if array.dtype == jnp.float32 else jnp.uint32
        return put(array.shape, other, axes)
    if kind == "size":
        larger = tuple(dataclasses.replace(axis, size=axis.size + 1) for axis in axes)
        return put(tuple(axis.size for axis in larger) or (1,), array.dtype, larger)
    if kind == "axes" and len(axes) > 1:
        turned = axes[::-1]
        return put(tuple(axis.size for axis in turned), array.dtype, turned)
    if kind == "vocabulary" and any(axis.name == "vocab" for axis in axes):
        more = tuple(
            dataclasses.replace(axis, size=axis.size + (axis.name == "vocab")) for axis in axes
        )
        return put(tuple(axis.size for axis in more), array.dtype, more)
    return like


def mismatch(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """One kind and array a trial; `count` trials in a row try that many different ones."""
    program = tiny.program(4, parallel=tiny.split(4))
    like = flat(program.abstract)
    checkpointer = Checkpointer(str(workspace), attempt="a")
    paths = [(s, checkpointer.save(s, flat(program.init()), {"rows": []})) for s in (1, 2)]
    checkpointer.wait()
    assert newest_sound(paths, like) is not None
    wrong = {
        (kind, name): other
        for kind in KINDS
        for name in like
        if (other := changed(kind, name, like)) is not like
    }
    cases = list(wrong)
    figures: Counter[str] = Counter()

    def trial(number: int) -> None:
        kind, name = cases[pick(number, len(cases))]
        try:
            newest_sound(paths, wrong[kind, name])
        except InputError as error:
            if f"'{name}" not in str(error):
                raise AssertionError(f"expected {name!r} to be named") from error
        else:
            raise AssertionError(f"{kind} of {name}: restored")
        figures[kind] += 1

    return {"trials": trials(seed, count, trial), "arrays": len(like), "of": len(cases), **figures}


FAULTS = {33: [Fault("a checkpoint of another model", 60, 300, mismatch)]}
