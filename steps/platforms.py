"""Restrict JAX to the CPU on machines without accelerators."""

from __future__ import annotations

import os
import sys
from glob import glob

_DEVICES = ("/dev/accel*", "/dev/vfio/*", "/dev/nvidia*", "/dev/kfd", "/dev/dri/renderD*")
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
