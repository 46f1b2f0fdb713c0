"""Joins the processes of a gang into one JAX program.

When a process dies, JAX's coordination service ends the others after the heartbeat timeout: the
gang fails as a whole, and the next attempt resumes from the newest checkpoint.

JAX reads its environment variables and XLA's when it starts, so the caller sets them before.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.errors import ResourcesUnavailable

HEARTBEAT_SECONDS = 60
INITIALIZATION_SECONDS = 300
# Longer than the slowest last save: process 0 commits it after the others have left.
SHUTDOWN_SECONDS = 3600
# Messages of libtpu and of the kernel.
_BUSY = re.compile("already in use|resource busy", re.IGNORECASE)


@contextmanager
def joined(address: str | None, count: int = 1, index: int = 0) -> Iterator[None]:
    """Process `index` of a gang whose process 0 listens on `address`; None for a single process.

    Opens the devices. Leaves the gang after success only, when every process does: after an error
    the others could not leave.

    Raises:
        ResourcesUnavailable: another process holds this host's chips.
    """
    import jax

    if address is None:
        # A CPU computes a step in the thread that calls it, see `training.trainer.cpu_memory`.
        # Several processes dispatch as on TPUs: the watchdog compares the steps each has queued.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    else:
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=count,
            process_id=index,
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
    yield
    if address is not None:
        jax.distributed.shutdown()
