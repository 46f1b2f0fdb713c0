"""Which devices JAX will find: those of hardware that is asked for, or of this machine."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from glob import glob

from pipeline import Hardware
from pipeline.accelerators import GPUS, TPUS, Chip
from training.cost.memory_plan import Devices

_DEVICES = ("/dev/accel*", "/dev/vfio/*", "/dev/nvidia*", "/dev/kfd", "/dev/dri/renderD*")
_ACCELERATORS = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*")
GPU_SHARE = 0.92  # of a GPU's memory, which JAX preallocates; its default is 0.75
_VIRTUAL = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_VARIABLES = ("TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")


def use_cpu_alone() -> None:
    """Set JAX_PLATFORMS to cpu on a machine without accelerators, unless the user has set it.

    A JAX that was imported before has read the variable already, and is told itself. JAX
    initialises libtpu if it is installed, and without a TPU libtpu writes errors to stderr that
    none of its settings suppresses.
    """
    if not sys.platform.startswith("linux") or any(map(os.environ.get, _VARIABLES)):
        return
    if not any(glob(pattern) for pattern in _DEVICES):
        given = os.environ.setdefault("JAX_PLATFORMS", "cpu")
        if (jax := sys.modules.get("jax")) is not None and not jax.config.jax_platforms:
            jax.config.update("jax_platforms", given)


def chip_of(hardware: Hardware) -> Chip | None:
    """The kind of chip of the hardware; None for CPUs and for local hardware."""
    return {**TPUS, **GPUS}.get(hardware.generation)


def devices_of(hardware: Hardware) -> Devices:
    """The devices of a pod."""
    if (chip := chip_of(hardware)) is None:
        return Devices("cpu", hardware.devices)
    limit = chip.usable if chip.usable is not None else GPU_SHARE * chip.memory
    found = Devices(hardware.kind, hardware.devices, limit, hardware.slices, chip.name)
    if hardware.kind != "gpu":
        return found
    return dataclasses.replace(found, per_host=hardware.devices_per_process)


def devices_here(hardware: Hardware) -> Devices | None:
    """The devices that JAX will find from this machine; None for accelerators of its own."""
    if hardware.devices:
        return devices_of(hardware)
    asked = os.environ.get("JAX_PLATFORMS")
    if asked != "cpu" and (asked or any(map(glob, _ACCELERATORS))):
        return None
    virtual = _VIRTUAL.findall(os.environ.get("XLA_FLAGS", ""))
    return Devices("cpu", int(virtual[-1]) if virtual else 1)
