"""Which named axis is split over which axis of the mesh.

The batch is split over "data" and "fsdp". A split state (https://arxiv.org/abs/1910.02054) is split
along "embed" over "fsdp". Where layers multiply, parameters are whole but for what "tensor" splits:
`Layout.gather` brings them there, and brings gradients back to where the state is, so that the
compiler never contracts over a piece of "embed".
"""

from __future__ import annotations

import functools
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
from training.sharding.mesh import DATA, FSDP, MESH_AXES, SEQUENCE, TENSOR, make_mesh

BATCH_AXES = (DATA, FSDP)
TENSOR_AXES = ("kv_heads", "query_features", "kv_features", "mlp", "vocab")

Tree = TypeVar("Tree")
Mapping = dict[str, Any]


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
    def batch_shards(self) -> int:
        """Number of pieces of the batch."""
        return self.mesh.shape[DATA] * self.mesh.shape[FSDP]

    @contextmanager
    def activations(self) -> Iterator[None]:
        """Traced inside, `haliax.auto_sharded` puts activations where `compute` says.

        Haliax constrains nothing where it finds no mesh. The abstract one is set while tracing, so
        the program is the same in whatever thread it is traced and for a topology description.
        """
        with use_abstract_mesh(self.mesh.abstract_mesh), hax.axis_mapping(self.compute):
            yield

    @property
    def compute(self) -> Mapping:
        """Mesh axes by which activations are divided, by the name of their axis."""
        mapping: Mapping = {"batch": BATCH_AXES}
        if self.mesh.shape[SEQUENCE] > 1:
            mapping["position"] = SEQUENCE
        return mapping | self._tensor

    @property
    def parameters(self) -> Mapping:
        """Axis mapping of parameters, gradients and optimizer state at rest."""
        return self._tensor | ({"embed": FSDP} if self.mesh.shape[FSDP] > 1 else {})

    @property
    def _tensor(self) -> Mapping:
        return dict.fromkeys(TENSOR_AXES, TENSOR) if self.mesh.shape[TENSOR] > 1 else {}

    @property
    def mesh_axes(self) -> MeshAxes:
        """The mesh axes of activations, for kernels and the loss."""
        several = {name for name in MESH_AXES if self.mesh.shape[name] > 1}
        return MeshAxes(
            self.mesh,
            batch=BATCH_AXES,
            heads=tuple(several & {TENSOR}),
            sequence=tuple(several & {SEQUENCE}),
        )

    def gather(self, tree: Tree) -> Tree:
        """Parameters at rest to where they are multiplied; cotangents the other way."""
        if self.mesh.shape[FSDP] == 1:
            return tree
        at_rest, whole = self.shardings(tree), self._shardings(tree, self._tensor)

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
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    @property
    def microbatch(self) -> NamedSharding:
        """Of an array [microbatch, batch, ...]: every microbatch's rows over all devices."""
        return NamedSharding(self.mesh, PartitionSpec(None, BATCH_AXES))

    def shardings(self, tree: Any) -> Any:
        """One `NamedSharding` per array of `tree` (state, gradients; arrays may be abstract).

        Raises:
            InputError: when an axis is not divisible by what splits it.
        """
        return self._shardings(tree, self.parameters)

    def _shardings(self, tree: Any, mapping: Mapping) -> Any:
        return jax.tree.map(lambda leaf: self._sharding(leaf, mapping), tree, is_leaf=is_named)

    def _sharding(self, leaf: Any, mapping: Mapping) -> Any:
        if not is_named(leaf):
            return self.replicated
        spec = []
        for axis in leaf.axes:
            target = mapping.get(axis.name)
            if target is not None and axis.size % self.mesh.shape[target]:
                name = "group" if target == FSDP else target
                raise InputError(
                    f"Parallelism.{name}: {axis.name} {axis.size} is not divisible by the "
                    f"{self.mesh.shape[target]} devices that share it; choose a number that "
                    "divides it"
                )
            spec.append(target)
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return hax.NamedArray(sharding, leaf.axes)  # pyrefly: ignore

    def abstract(self, shapes: Any) -> Any:
        """`shapes` (of `jax.eval_shape`) with the sharding every array will have."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.shardings(shapes),
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
    if batch_size % (layout.batch_shards * microbatches):
        raise InputError(
            f"TrainConfig.batch_size: {batch_size} is not divisible by {layout.batch_shards} "
            f"devices (data {layout.mesh.shape[DATA]} x fsdp {layout.mesh.shape[FSDP]}) times "
            f"{microbatches} microbatches; choose a multiple of "
            f"{layout.batch_shards * microbatches}"
        )
