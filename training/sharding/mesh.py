"""The mesh of devices, with the axes "data", "fsdp", "sequence" and "tensor".

On TPUs, neighbours on the mesh are neighbours in the slice's torus. Only the data-center network
joins several slices, and only "data" spans them. Other devices are ordered by process, so that the
last axes, which communicate most, stay within a host if they fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from pipeline.errors import InputError
from training.config import Parallelism
from training.config.axis_rules import MESH_AXES

Shape = tuple[int, int, int, int]


def make_mesh(devices: Sequence[jax.Device], parallel: Parallelism) -> Mesh:
    """The mesh of all devices of all processes, or of those of a topology description.

    `parallel` is without "auto". Raises `InputError` when the mesh axes do not divide the devices.
    """
    shape = parallel.mesh_shape(len(devices))
    arranged = _on_torus if devices[0].platform == "tpu" else _by_process
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    return Mesh(arranged(devices, shape), MESH_AXES, axis_types=axis_types)


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
