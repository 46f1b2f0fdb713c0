"""Noticing SIGTERM, which a spot machine gets some 30 seconds before it is taken away.

A handler sets a flag that the loop looks at between steps. This is for a single process: the
processes of a gang would have to leave the loop at the same step, and JAX's own agreement on one
(`multihost_utils.reached_preemption_sync_point`) let one process save while another was still
inside a step, which hung both. A gang that loses a process ends as a whole and goes on from its
newest checkpoint.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType

logger = logging.getLogger(__name__)


class StopSignal:
    """Context in which SIGTERM asks the loop to stop instead of ending the process.

    Args:
        enabled: False leaves the signal alone, as a process of a gang must.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._flag = threading.Event()
        self._old: object = None
        self._installed = False

    def __enter__(self) -> StopSignal:
        if self._enabled:
            if threading.current_thread() is threading.main_thread():
                self._old = signal.signal(signal.SIGTERM, self._on_signal)
                self._installed = True
            else:
                logger.info("not in the main thread: SIGTERM will not write a checkpoint")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, self._old)  # pyrefly: ignore

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._flag.set()

    def requested(self) -> bool:
        """Whether to stop after the step that is under way."""
        return self._flag.is_set()
