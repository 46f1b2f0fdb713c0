"""The mesh of devices, with the axes "data", "fsdp", "sequence" and "tensor".

Devices are ordered by process, so every process owns one contiguous range of the batch's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from pipeline.errors import InputError
from training.config import Parallelism

DATA, FSDP, SEQUENCE, TENSOR = MESH_AXES = ("data", "fsdp", "sequence", "tensor")


def make_mesh(devices: Sequence[Any], parallel: Parallelism) -> Mesh:
    """The mesh of `devices` (of `jax.devices()` or of a topology description).

    Args:
        devices: all of them, of all processes.
        parallel: with a concrete sharding.

    Raises:
        InputError: when the devices cannot be divided so.
    """
    shape = parallel.mesh_shape(len(devices))
    processes = len({device.process_index for device in devices})
    local = len(devices) // processes
    if local % (parallel.sequence * parallel.tensor):
        raise InputError(
            f"Parallelism: sequence {parallel.sequence} x tensor {parallel.tensor} do not divide "
            f"the {local} devices of a process; they must not reach over processes"
        )
    ordered = np.empty(len(devices), dtype=object)
    ordered[:] = sorted(devices, key=lambda device: (device.process_index, device.id))
    return Mesh(ordered.reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
