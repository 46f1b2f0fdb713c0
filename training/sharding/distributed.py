"""Joins the processes of a run into one JAX program.

Every process calls `initialize` with the same address and its own index before it uses a device.
When a process dies, JAX's coordination service ends the others after the heartbeat timeout: the
gang fails as a whole, and the next attempt resumes from the newest checkpoint.

JAX reads its environment variables and XLA's when it starts, so the caller sets them before.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from pipeline.errors import InputError, ResourcesUnavailable

HEARTBEAT_SECONDS = 60
INITIALIZATION_SECONDS = 300
# Longer than the slowest last save: process 0 commits it after the others have left.
SHUTDOWN_SECONDS = 3600
# Messages of libtpu and of the kernel.
_BUSY = re.compile("already in use|resource busy", re.IGNORECASE)


@dataclass(frozen=True)
class Coordinator:
    """Address ("host:port") of process 0, number of processes, and index of this process."""

    address: str
    count: int
    index: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise InputError(
                f"Coordinator: expected 0 <= index < count, got {self.index} of {self.count}"
            )
        if ":" not in self.address:
            raise InputError(f'Coordinator.address: expected "host:port", got {self.address!r}')


def initialize(coordinator: Coordinator | None) -> None:
    """Join the gang, unless `coordinator` is None (a single process), and open the devices.

    Raises:
        ResourcesUnavailable: when another process holds this host's chips, such as one left from
            an earlier run; the step then waits for resources and is scheduled again.
    """
    import jax

    if coordinator is not None:
        jax.distributed.initialize(
            coordinator_address=coordinator.address,
            num_processes=coordinator.count,
            process_id=coordinator.index,
            initialization_timeout=INITIALIZATION_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    try:
        jax.local_devices()
    except RuntimeError as error:
        if _BUSY.search(str(error)):
            line = " ".join(str(error).split())[:200]
            raise ResourcesUnavailable(
                f"host {socket.gethostname()}: another process holds its chips ({line}); end it, "
                "or recreate the host"
            ) from error
        raise


def shutdown() -> None:
    """Leave the gang; blocks until every process has called it. Call it after success only."""
    import jax

    jax.distributed.shutdown()
