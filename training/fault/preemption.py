"""Noticing SIGTERM, which a spot machine gets some 30 seconds before it is taken away.

One process: a handler sets a flag that the loop looks at between steps. Many processes: JAX's
coordination service hears the signal of any of them and answers yes in all of them at the same
step, so that all leave the loop together. A second signal changes nothing, also when it comes while
the process is on its way out.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

from jax.experimental import multihost_utils

logger = logging.getLogger(__name__)


class StopSignal:
    """Context in which SIGTERM asks the loop to stop instead of ending the process."""

    def __init__(self, *, many_processes: bool) -> None:
        self._many = many_processes
        self._asked = 0
        # No `threading.Event`: its lock may be held by what the handler interrupts.
        self._stopping = False
        self._old: object = None
        self._installed = False

    def __enter__(self) -> StopSignal:
        if not self._many:
            if threading.current_thread() is threading.main_thread():
                self._old = signal.signal(signal.SIGTERM, self._on_signal)
                self._installed = True
            else:
                logger.info("not in the main thread: SIGTERM will not write a checkpoint")
        return self

    def __exit__(self, *_: object) -> None:
        # By default a second one would end the process before it has reported its preemption.
        leaving = self._stopping and self._old is signal.SIG_DFL
        if self._installed and not leaving:
            signal.signal(signal.SIGTERM, self._old)  # pyrefly: ignore

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    def requested(self) -> bool:
        """Whether to stop now; many processes must all ask, equally often and at the same places.

        Once they have agreed to stop, it stays so.
        """
        if self._many and not self._stopping:
            self._asked += 1
            if multihost_utils.reached_preemption_sync_point(self._asked):
                self._stopping = True
        return self._stopping

    @property
    def alone(self) -> bool:
        """Whether the signal has arrived and no other process need agree."""
        return not self._many and self._stopping
