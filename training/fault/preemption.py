"""Handles SIGTERM, which a spot machine gets some 30 seconds before it is preempted.

One process: a handler sets a flag that the loop reads between steps. Many processes: when any of
them gets the signal, JAX's coordination service reports it in all of them at the same step, so that
all leave the loop together. A second signal has no effect, also while the process exits.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

from jax.experimental import multihost_utils

logger = logging.getLogger(__name__)


class StopSignal:
    """Context in which SIGTERM requests a stop of the loop instead of ending the process."""

    def __init__(self, *, many_processes: bool) -> None:
        self._many = many_processes
        self._calls = 0
        # Not a `threading.Event`: the code that the handler interrupts may hold its lock.
        self._stopping = False
        self._old: Any = None

    def __enter__(self) -> StopSignal:
        if not self._many:
            if threading.current_thread() is threading.main_thread():
                self._old = signal.signal(signal.SIGTERM, self._on_signal)
            else:
                logger.info("not in the main thread: SIGTERM will not write a checkpoint")
        return self

    def __exit__(self, *_: object) -> None:
        # The default handler would let a second SIGTERM end the process before it has reported its
        # preemption, so ours stays.
        leaving = self._stopping and self._old is signal.SIG_DFL
        if self._old is not None and not leaving:
            signal.signal(signal.SIGTERM, self._old)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    def requested(self) -> bool:
        """Whether to stop now; stays True once it was True.

        With many processes, all must call it equally often and at the same points of the loop.
        """
        if self._many and not self._stopping:
            self._calls += 1
            if multihost_utils.reached_preemption_sync_point(self._calls):
                self._stopping = True
        return self._stopping

    @property
    def alone(self) -> bool:
        """Whether to stop now, without asking other processes."""
        return not self._many and self._stopping
