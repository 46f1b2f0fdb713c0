"""Conversion of the engine's description of a gang process to the trainer's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline import GangProcess

if TYPE_CHECKING:
    from training.sharding.distributed import Coordinator

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")
"""Environment variables that change what JAX computes; every step that uses JAX declares them."""

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
