"""Cheap compilation for the whole suite: tests compile much, compute little, and compile it again.

Set in the environment, so that every process a test starts compiles in the same way: results of
several processes are compared bit for bit.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from models.jax_versions import WITHOUT_MLIR

_FLAGS = (
    *(f"--{name}={str(value).lower()}" for name, value in WITHOUT_MLIR.items()),
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)


def xla_flags(devices: int) -> str:
    """`XLA_FLAGS` of a process with that many virtual devices."""
    return " ".join([*_FLAGS, f"--xla_force_host_platform_device_count={devices}"])


def share_programs() -> None:
    """Keep compiled programs in a folder of this session, which its processes share."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
