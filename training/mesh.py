"""Devices as a mesh of two axes, and which named axis is split over which of them.

The batch is split over both mesh axes. Parameters and optimizer state are split along "embed" over
"fsdp" when that axis is larger than 1 (https://arxiv.org/abs/1910.02054, stage 3), else replicated.
Devices are ordered by process, so every process owns one contiguous range of the batch's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pipeline.errors import InputError

DATA = "data"
FSDP = "fsdp"
BATCH_AXES = (DATA, FSDP)


def is_named(leaf: Any) -> bool:
    """Whether a tree node is a named array (a leaf for everything that looks at axis names)."""
    return isinstance(leaf, hax.NamedArray)


@dataclass(frozen=True)
class Layout:
    """A mesh with axes ("data", "fsdp") and what is split over it."""

    mesh: Mesh

    @property
    def devices(self) -> int:
        """Number of devices of the mesh, over all processes."""
        return self.mesh.size

    @property
    def fsdp(self) -> int:
        """Number of devices that share one copy of the parameters."""
        return self.mesh.shape[FSDP]

    @property
    def compute(self) -> dict[str, tuple[str, ...]]:
        """Axis mapping of activations, for `haliax.axis_mapping`."""
        return {"batch": BATCH_AXES}

    @property
    def parameters(self) -> dict[str, str]:
        """Axis mapping of parameters, gradients and optimizer state."""
        return {"embed": FSDP} if self.fsdp > 1 else {}

    @property
    def replicated(self) -> NamedSharding:
        """A whole copy on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """Of an array [batch, ...]: rows over all devices."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))

    @property
    def microbatch(self) -> NamedSharding:
        """Of an array [microbatch, batch, ...]: every microbatch's rows over all devices."""
        return NamedSharding(self.mesh, PartitionSpec(None, BATCH_AXES))

    def shardings(self, tree: Any) -> Any:
        """One `NamedSharding` per array of `tree` (state, gradients; arrays may be abstract).

        Raises:
            InputError: when "embed" is not divisible by the fsdp size.
        """
        return jax.tree.map(self._sharding, tree, is_leaf=is_named)

    def _sharding(self, leaf: Any) -> Any:
        if not is_named(leaf):
            return self.replicated
        spec = []
        for axis in leaf.axes:
            target = self.parameters.get(axis.name)
            if target is not None and axis.size % self.mesh.shape[target]:
                raise InputError(
                    f"TrainConfig.fsdp: {axis.name} {axis.size} is not divisible by fsdp "
                    f"{self.fsdp}; choose an fsdp that divides it"
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

    def place(self, rows: np.ndarray, batch_size: int) -> jax.Array:
        """The global array [batch_size, ...] of which this process has `rows` (its own part)."""
        return jax.make_array_from_process_local_data(
            self.batch, rows, (batch_size, *rows.shape[1:])
        )


def make_layout(devices: Sequence[Any], fsdp: int = 1) -> Layout:
    """A layout over `devices` (of `jax.devices()` or of a topology description).

    Raises:
        InputError: when the number of devices is not divisible by `fsdp`.
    """
    if len(devices) % fsdp:
        raise InputError(
            f"TrainConfig.fsdp: {len(devices)} devices are not divisible by fsdp {fsdp}; "
            "choose an fsdp that divides the number of devices"
        )
    ordered = np.empty(len(devices), dtype=object)
    ordered[:] = sorted(devices, key=lambda device: (device.process_index, device.id))
    mesh = Mesh(ordered.reshape(-1, fsdp), BATCH_AXES, axis_types=(AxisType.Auto,) * 2)
    return Layout(mesh)


def check_batch(layout: Layout, batch_size: int, microbatches: int) -> None:
    """Raise `InputError` unless every microbatch spreads evenly over all devices."""
    if batch_size % (layout.devices * microbatches):
        raise InputError(
            f"TrainConfig.batch_size: {batch_size} is not divisible by {layout.devices} devices "
            f"(data {layout.mesh.shape[DATA]} x fsdp {layout.fsdp}) times {microbatches} "
            f"microbatches; choose a multiple of {layout.devices * microbatches}"
        )
