"""Restrict JAX to the CPU on machines without accelerators."""

from __future__ import annotations

import os
import sys
from glob import glob

_DEVICES = ("/dev/accel*", "/dev/vfio/*", "/dev/nvidia*", "/dev/kfd", "/dev/dri/renderD*")
_VARIABLES = ("TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")


def use_cpu_alone() -> None:
    """Set JAX_PLATFORMS to cpu on a machine without accelerators, unless the user has set it.

    JAX initialises libtpu if it is installed, and without a TPU libtpu writes errors to stderr
    that none of its settings suppresses.
    """
    if not sys.platform.startswith("linux") or any(map(os.environ.get, _VARIABLES)):
        return
    if not any(glob(pattern) for pattern in _DEVICES):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
