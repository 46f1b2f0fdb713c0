"""Conversion of the engine's description of a gang process to the trainer's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline import GangProcess

if TYPE_CHECKING:
    from training.sharding.distributed import Coordinator

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
"""Those of the trackers, see `training.metrics.trackers.backends`."""


def coordinator_of(process: GangProcess) -> Coordinator | None:
    """The `jax.distributed` coordinator of the gang; None for a gang of one process."""
    from training.sharding.distributed import Coordinator

    if process.coordinator is None:
        return None
    return Coordinator(process.coordinator, process.count, process.index)
