"""The mesh of devices and the shardings of a run's arrays on it, by its `AxisRules`.

A split state (https://arxiv.org/abs/1910.02054) is sharded over "fsdp": along "embed", and tables
along "vocab". While layers multiply them, parameters are split by "tensor" only: `Layout.gather`
gathers them over "fsdp", and its backward pass returns gradients in the sharding of the state, so
the compiler never contracts over a shard of "embed".

On TPUs, neighbours on the mesh are neighbours in the slice's torus. Only the data-center network
joins several slices, and only "data" spans them. Other devices are ordered by process, so that the
last axes, which communicate most, stay within a host if they fit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

import models.named as hax
from models.layers.axes import LAYERS, MeshAxes, sum_scatter
from models.transformer import Forward
from pipeline.accelerators import chip_of
from pipeline.errors import InputError
from training.config import Parallelism
from training.config.parallelism import FSDP, MESH_AXES, AxisRules, Rules, assign

Shape = tuple[int, int, int, int]


def make_layout(devices: Sequence[jax.Device], parallel: Parallelism | None = None) -> Layout:
    """A layout over all devices, or those of a topology; `parallel` is without "auto".

    It is "replicated" by default.
    """
    parallel = parallel or Parallelism(sharding="replicated")
    arranged = _on_torus if devices[0].platform == "tpu" else _by_process
    ordered = arranged(devices, parallel.mesh_shape(len(devices)))
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    return Layout(Mesh(ordered, MESH_AXES, axis_types=axis_types), parallel)


def _by_process(devices: Sequence[jax.Device], shape: Shape) -> np.ndarray:
    ordered = np.empty(len(devices), dtype=object)
    ordered[:] = sorted(devices, key=lambda device: (device.process_index, device.id))
    return ordered.reshape(shape)


def slice_count(devices: Sequence[jax.Device]) -> int:
    """Number of TPU slices of the devices; 1 for other devices, where JAX counts hosts instead."""
    if devices[0].platform != "tpu":
        return 1
    # Devices of a topology description have the attribute only with several slices.
    return len({getattr(device, "slice_index", 0) for device in devices})


def _on_torus(devices: Sequence[jax.Device], shape: Shape) -> np.ndarray:
    slices = slice_count(devices)
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    data, *inner = shape
    if data % slices:
        raise InputError(
            f"Parallelism: {slices} slices are joined along the data axis, which has {data} "
            f"places; choose a group that divides the {len(devices) // slices} devices of a slice"
        )
    return mesh_utils.create_hybrid_device_mesh(
        (data // slices, *inner),
        (slices, 1, 1, 1),
        devices,
        allow_split_physical_axes=True,
    )


Tree = TypeVar("Tree")


def is_named(leaf: Any) -> bool:
    """Whether a tree node is a named array; `is_leaf` of functions that read axis names."""
    return isinstance(leaf, hax.NamedArray)


@dataclass(frozen=True)
class Layout:
    """A mesh with the rules that shard arrays over it."""

    mesh: Mesh
    parallel: Parallelism

    @property
    def devices(self) -> int:
        return self.mesh.size

    @property
    def platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    @property
    def chip(self) -> str:
        """Its name in `pipeline.accelerators`, or ""."""
        found = chip_of(self.mesh.devices.flat[0].device_kind)
        return "" if found is None else found.name

    @property
    def rules(self) -> AxisRules:
        return self.parallel.rules

    @property
    def batch_shards(self) -> int:
        return self._devices(self.rules.axes("batch"))

    def whole_batch(self, rows: int) -> int:
        """`rows` sequences of a batch, rounded up to a multiple of the batch shards."""
        return self.batch_shards * max(1, math.ceil(rows / self.batch_shards))

    @contextmanager
    def activations(self) -> Iterator[None]:
        """Context for tracing in which `haliax.auto_sharded` shards activations by the rules.

        Code written per device needs a mesh too. An abstract one makes the program the same in
        every thread that traces it and for a topology description.
        """
        mapping = {name: axes for name, axes in self.rules.activations if self._devices(axes) > 1}
        with use_abstract_mesh(self.mesh.abstract_mesh), hax.axis_mapping(mapping):
            yield

    @property
    def mesh_axes(self) -> MeshAxes:
        """The mesh axes of activations, for code written per device."""
        batch = self.rules.axes("batch")
        split = {axis for name, axes in self.rules.params if name == "vocab" for axis in axes}
        return MeshAxes(
            batch=batch,
            heads=self._several(self.rules.axes("kv_heads")),
            sequence=self._several(self.rules.axes("position")),
            tables=self._several(tuple(axis for axis in batch if axis in split)),
            split_tables=self.rules.splits_tables,
            # A CPU's compiler fails at sums of bfloat16 over devices.
            wide_sums=self.parallel.sums == "float32" or self.platform == "cpu",
        )

    def forward(self, backend: str, *, alone: bool = False, **options: Any) -> Forward:
        """A forward pass with an attention back end; `options` are of `Forward`.

        It is on this mesh, or without one if `alone`, for code that `shard_map` runs on each
        device. With "fsdp", layers gather their parameters themselves.
        """
        if not alone:
            gather = self.gather if self.parallel.sharding == "fsdp" else None
            options = {**options, "mesh_axes": self.mesh_axes, "gather": gather}
        return Forward(backend=backend, features_first=self.platform == "tpu", **options)

    def sum_once(
        self, run: Callable[[Tree, jax.Array], tuple[Any, Tree]], whole: Tree, rows: jax.Array
    ) -> tuple[Any, Tree]:
        """(sums, tree like `whole`) of every device's part of `rows`, added up over devices.

        `rows` is [microbatch, batch, ...], and `run` sees whole arrays and no mesh. The returned
        tree has the shardings of parameters, so a device adds up the part that it stores.
        """
        leaves, structure = jax.tree.flatten(whole)
        at_rest = [each.spec for each in jax.tree.leaves(self.shardings(whole))]
        axes = self.rules.axes("batch")

        def one_device(leaves: list[jax.Array], rows: jax.Array) -> tuple[Any, list[jax.Array]]:
            sums, tree = run(jax.tree.unflatten(structure, leaves), rows)
            parts = map(functools.partial(_sum_part, axes), jax.tree.leaves(tree), at_rest)
            return jax.lax.psum(sums, axes), list(parts)

        sums, parts = jax.shard_map(
            one_device,
            mesh=self.mesh.abstract_mesh,
            in_specs=(PartitionSpec(), self.microbatch.spec),
            out_specs=(PartitionSpec(), at_rest),
            check_vma=False,
        )(leaves, rows)
        return sums, jax.tree.unflatten(structure, parts)

    def _devices(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def _several(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def gather(self, tree: Tree) -> Tree:
        """Parameters as stored -> as multiplied (all-gather); cotangents the other way."""
        if self.mesh.shape[FSDP] == 1:
            return tree
        at_rest, whole = self.shardings(tree), self.shardings(tree, self.rules.compute_params)
        # The transpose of a sharding constraint is the same constraint, which would keep cotangents
        # whole on every device. In the stored sharding XLA can reduce-scatter their sum.

        @jax.custom_vjp
        def move(tree: Tree) -> Tree:
            return jax.lax.with_sharding_constraint(tree, whole)

        def backward(_: None, cotangent: Tree) -> tuple[Tree]:
            return (jax.lax.with_sharding_constraint(cotangent, at_rest),)

        move.defvjp(lambda tree: (move(tree), None), backward)
        return move(tree)

    def gather_model(self, model: Any) -> Any:
        """`gather` once a step: the whole model with "zero1", all but the blocks with "fsdp"."""
        if self.parallel.sharding != "fsdp":
            return self.gather(model)
        outside = self.gather(eqx.tree_at(lambda m: m.blocks, model, None))
        return eqx.tree_at(lambda m: m.blocks, outside, model.blocks, is_leaf=lambda x: x is None)

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """The sharding of an array [batch, ...]: split over the mesh axes of "batch"."""
        return NamedSharding(self.mesh, PartitionSpec(self.rules.axes("batch")))

    @property
    def microbatch(self) -> NamedSharding:
        """The sharding of an array [microbatch, batch, ...]: each microbatch split as a batch."""
        return NamedSharding(self.mesh, PartitionSpec(None, self.rules.axes("batch")))

    def shardings(self, tree: Any, rules: Rules | None = None) -> Any:
        """One `NamedSharding` per array of `tree`, by the rules of parameters if not others."""
        rules = self.rules.params if rules is None else rules
        return jax.tree.map(lambda leaf: self._sharding(leaf, rules), tree, is_leaf=is_named)

    def _sharding(self, leaf: Any, rules: Rules) -> Any:
        if not is_named(leaf):
            return self.replicated
        sizes = {axis.name: axis.size for axis in leaf.axes}
        if len(sizes.keys() - {LAYERS}) == 1:
            # A norm's weight or a bias is smaller than what gathering it costs.
            rules = tuple((name, axes) for name, axes in rules if FSDP not in axes)
        found = assign(sizes, rules, self.mesh.shape)
        spec = (_one_or_several(found.get(axis.name)) for axis in leaf.axes)
        sharding = NamedSharding(self.mesh, PartitionSpec(*spec))
        return hax.NamedArray(sharding, leaf.axes)  # pyrefly: ignore

    def abstract(self, shapes: Any, rules: Rules | None = None) -> Any:
        """`shapes` (of `jax.eval_shape`) with the sharding of every array."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            self.shardings(shapes, rules),
        )

    def process_rows(self, batch_size: int) -> np.ndarray:
        """Indices of the batch's sequences on this process's devices, int64, ascending.

        Processes that differ only along "sequence" or "tensor" have the same indices.
        """
        return _process_rows(self.batch, batch_size)

    def place(self, rows: np.ndarray, batch_size: int) -> jax.Array:
        """The global array [batch_size, ...]; `rows` holds `process_rows`, in that order."""
        mine = self.process_rows(batch_size)

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(batch_size)
            first, end = np.searchsorted(mine, (start, stop))
            return rows[first:end]

        shape = (batch_size, *rows.shape[1:])
        return jax.make_array_from_callback(shape, self.batch, part)


def _sum_part(axes: tuple[str, ...], leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
    """The sum over the devices along `axes`, of which each keeps its part by `spec`."""
    left = list(axes)
    for dimension, names in enumerate(spec):
        for name in (names,) if isinstance(names, str) else names or ():
            leaf = sum_scatter(leaf, (name,), dimension, wide=False)
            left.remove(name)
    return jax.lax.psum(leaf, left) if left else leaf


def _one_or_several(axes: tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    return axes[0] if axes and len(axes) == 1 else axes


@functools.cache
def _process_rows(sharding: NamedSharding, batch_size: int) -> np.ndarray:
    held = sharding.addressable_devices_indices_map((batch_size,)).values()
    every = np.arange(batch_size, dtype=np.int64)
    rows = np.unique(np.concatenate([every[index[0]] for index in held if index is not None]))
    rows.flags.writeable = False
    return rows
