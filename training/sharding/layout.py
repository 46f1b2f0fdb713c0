"""A mesh of devices and what `AxisRules` split over it.

A split state (https://arxiv.org/abs/1910.02054) is split along "embed", tables along "vocab", over
"fsdp". Where layers multiply, parameters are whole but for what "tensor" splits: `Layout.gather`
brings them there, and brings gradients back to where the state is, so that the compiler never
contracts over a piece of "embed".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from models.mesh_axes import MeshAxes
from pipeline.errors import InputError
from training.config import Parallelism
from training.config.axis_rules import FSDP, AxisRules, Rules, assign
from training.sharding.mesh import make_mesh

Tree = TypeVar("Tree")


def is_named(leaf: Any) -> bool:
    """Whether a tree node is a named array (a leaf for everything that looks at axis names)."""
    return isinstance(leaf, hax.NamedArray)


@dataclass(frozen=True)
class Layout:
    """A mesh and what is split over it."""

    mesh: Mesh
    parallel: Parallelism

    @property
    def devices(self) -> int:
        """Number of devices of the mesh, over all processes."""
        return self.mesh.size

    @property
    def platform(self) -> str:
        """Of the devices: "tpu", "gpu" or "cpu"."""
        return self.mesh.devices.flat[0].platform

    @property
    def rules(self) -> AxisRules:
        """Which named axes the mesh splits."""
        return self.parallel.rules

    @property
    def batch_shards(self) -> int:
        """Number of pieces of the batch."""
        return self._devices(self.rules.axes("batch"))

    @contextmanager
    def activations(self) -> Iterator[None]:
        """Traced inside, `haliax.auto_sharded` puts activations where the rules say.

        Haliax constrains nothing where it finds no mesh, and code written per device needs one. The
        abstract one is set while tracing, so the program is the same in whatever thread it is
        traced and for a topology description.
        """
        mapping = {name: axes for name, axes in self.rules.activations if self._devices(axes) > 1}
        with use_abstract_mesh(self.mesh.abstract_mesh), hax.axis_mapping(mapping):
            yield

    @property
    def mesh_axes(self) -> MeshAxes:
        """The mesh axes of activations, for the code that is written per device."""
        batch = self.rules.axes("batch")
        split = {axis for name, axes in self.rules.params if name == "vocab" for axis in axes}
        return MeshAxes(
            batch=batch,
            heads=self._several(self.rules.axes("kv_heads")),
            sequence=self._several(self.rules.axes("position")),
            tables=self._several(tuple(axis for axis in batch if axis in split)),
            split_tables=self.rules.splits_tables,
        )

    def _devices(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def _several(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def gather(self, tree: Tree) -> Tree:
        """Parameters at rest to where they are multiplied; cotangents the other way."""
        if self.mesh.shape[FSDP] == 1:
            return tree
        at_rest, whole = self.shardings(tree), self._shardings(tree, self.rules.compute_params)

        @jax.custom_vjp
        def move(tree: Tree) -> Tree:
            return jax.lax.with_sharding_constraint(tree, whole)

        def backward(_: None, cotangent: Tree) -> tuple[Tree]:
            return (jax.lax.with_sharding_constraint(cotangent, at_rest),)

        move.defvjp(lambda tree: (move(tree), None), backward)
        return move(tree)

    def gather_model(self, model: Any) -> Any:
        """`gather` of what a whole step needs: all with "zero1", all but the blocks with "fsdp"."""
        if self.parallel.sharding != "fsdp":
            return self.gather(model)
        outside = self.gather(eqx.tree_at(lambda m: m.blocks, model, None))
        return eqx.tree_at(lambda m: m.blocks, outside, model.blocks, is_leaf=lambda x: x is None)

    def gather_block(self, block: Tree) -> Tree:
        """`gather` of one layer with "fsdp", else nothing."""
        return self.gather(block) if self.parallel.sharding == "fsdp" else block

    @property
    def replicated(self) -> NamedSharding:
        """A whole copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Of an array [batch, ...]: rows over all devices that "sequence" and "tensor" leave."""
        return NamedSharding(self.mesh, PartitionSpec(self.rules.axes("batch")))

    @property
    def microbatch(self) -> NamedSharding:
        """Of an array [microbatch, batch, ...]: every microbatch's rows over all devices."""
        return NamedSharding(self.mesh, PartitionSpec(None, self.rules.axes("batch")))

    def shardings(self, tree: Any, rules: Rules | None = None) -> Any:
        """One `NamedSharding` per array of `tree`; arrays may be abstract.

        Args:
            tree: parameters, gradients, optimizer state.
            rules: default those of parameters between steps.

        Raises:
            InputError: when an axis is not divisible by what splits it.
        """
        return self._shardings(tree, self.rules.params if rules is None else rules)

    def _shardings(self, tree: Any, rules: Rules) -> Any:
        return jax.tree.map(lambda leaf: self._sharding(leaf, rules), tree, is_leaf=is_named)

    def _sharding(self, leaf: Any, rules: Rules) -> Any:
        if not is_named(leaf):
            return self.replicated
        found = assign({axis.name: axis.size for axis in leaf.axes}, rules, self.mesh.shape)
        spec = (_one_or_several(found.get(axis.name)) for axis in leaf.axes)
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return hax.NamedArray(sharding, leaf.axes)  # pyrefly: ignore

    def abstract(self, shapes: Any, rules: Rules | None = None) -> Any:
        """`shapes` (of `jax.eval_shape`) with the sharding every array will have."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.shardings(shapes, rules),
        )

    def process_rows(self, batch_size: int) -> np.ndarray:
        """Rows of a batch that this process's devices hold, int64, ascending.

        Processes among which "sequence" or "tensor" divide the model hold the same rows.
        """
        return _process_rows(self.batch, batch_size)

    def place(self, rows: np.ndarray, batch_size: int) -> jax.Array:
        """The global array [batch_size, ...]; `rows` are those of `process_rows`, in order."""
        mine = self.process_rows(batch_size)

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(batch_size)
            first, end = np.searchsorted(mine, (start, stop))
            return rows[first:end]

        shape = (batch_size, *rows.shape[1:])
        return jax.make_array_from_callback(shape, self.batch, part)


def _one_or_several(axes: tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    return axes[0] if axes and len(axes) == 1 else axes


@functools.cache
def _process_rows(sharding: NamedSharding, batch_size: int) -> np.ndarray:
    held = sharding.addressable_devices_indices_map((batch_size,)).values()
    every = np.arange(batch_size, dtype=np.int64)
    rows = np.unique(np.concatenate([every[index[0]] for index in held if index is not None]))
    rows.flags.writeable = False
    return rows


def make_layout(devices: Sequence[Any], parallel: Parallelism | None = None) -> Layout:
    """A layout over `devices` (of `jax.devices()` or of a topology description).

    Args:
        devices: all of them, of all processes.
        parallel: with a concrete sharding; default all copied.

    Raises:
        InputError: when the devices cannot be divided so.
    """
    parallel = parallel or Parallelism(sharding="replicated")
    return Layout(make_mesh(devices, parallel), parallel)


def check_batch(layout: Layout, batch_size: int, microbatches: int) -> None:
    """Raise `InputError` unless every microbatch spreads evenly over all devices."""
    axes = layout.rules.axes("batch")
    if batch_size % (layout.batch_shards * microbatches):
        raise InputError(
            f"TrainConfig.batch_size: {batch_size} is not divisible by {layout.batch_shards} "
            f"devices ({' x '.join(f'{a} {layout.mesh.shape[a]}' for a in axes)}) times "
            f"{microbatches} microbatches; choose a multiple of "
            f"{layout.batch_shards * microbatches}"
        )
