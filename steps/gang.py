"""The processes of a gang: how they join each other, and the variables of JAX that they inherit."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from pipeline import GangProcess
from steps.platforms import GPU_SHARE

FLAGS = (
    *("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS", "NVIDIA_TF32_OVERRIDE"),
    *("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_OPTIMIZATION_LEVEL"),
)
"""Environment variables that change how JAX compiles; every step that uses JAX declares them. Those
that would change what it computes have no effect, see `models.jax_numerics`."""

HUB = ("HF_TOKEN", "HF_ENDPOINT")
"""Those of the Hugging Face hub, for steps that read from it or write to it."""

TRACKING = (
    *HUB,
    *("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_MODE"),
    *("TRACKIO_DIR", "TRACKIO_PROJECT", "TRACKIO_SPACE_ID"),
)
"""Those of the trackers, see `training.metrics.trackers`."""


def joined(process: GangProcess) -> AbstractContextManager[None]:
    """A context in which the process has joined its gang and opened its devices."""
    from training.sharding import distributed

    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(GPU_SHARE))
    return distributed.joined(process.coordinator, process.count, process.index)
