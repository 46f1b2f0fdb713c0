"""From the engine's view of a gang process to the trainer's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline import GangProcess

if TYPE_CHECKING:
    from training.sharding.distributed import Coordinator

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")
"""Variables that change what JAX computes: recorded of every step that computes with it."""


def coordinator_of(process: GangProcess) -> Coordinator | None:
    """Where the gang's processes meet; None for a gang of one."""
    from training.sharding.distributed import Coordinator

    if process.coordinator is None:
        return None
    return Coordinator(process.coordinator, process.count, process.index)
