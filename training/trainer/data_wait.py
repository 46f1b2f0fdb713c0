"""Measures how long the devices waited for batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from training.metrics.stopwatch import Stopwatch

if TYPE_CHECKING:
    import jax
    import numpy as np

BEHIND_SECONDS = 1e-3
"""A longer wait for a batch shows that the loader does not keep up."""


class TimedBatches:
    """Iterates over the loader's batches; counts the devices' idle time as `data_wait`.

    While the newest step still runs on the devices, waiting for a batch costs nothing and is part
    of `step`. If the step has ended by the time the batch arrives, the whole wait counts, although
    the step covered an unknown part of it. From then on, until the loader keeps up again, the host
    first waits for the step, and only the wait after it counts. The loader's queue is empty then,
    so this delays only the hand-over of the next batch.

    Args:
        batches: the loader.
        watch: the stopwatch, in `step` while the loop runs.
        clock: the stopwatch's clock, in nanoseconds.
        waiting: context of the wait for a batch, such as `Watchdog.waiting`.
    """

    def __init__(
        self,
        batches: Iterator[np.ndarray],
        watch: Stopwatch,
        clock: Callable[[], int] = time.perf_counter_ns,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._batches, self._watch, self._clock, self._waiting = batches, watch, clock, waiting
        self._running: Any = None
        self._behind = False

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def set_inflight(self, array: jax.Array) -> None:
        """Set an array that the step just queued computes; None when no step is in flight."""
        self._running = array

    def __next__(self) -> np.ndarray:
        running = self._running
        if self._behind and running is not None:
            running.block_until_ready()
        started = self._clock()
        with self._waiting():
            batch = next(self._batches)
        waited = self._clock() - started
        idle = running is None or running.is_ready()
        self._behind = idle and running is not None and waited > BEHIND_SECONDS * 1e9
        if idle:
            self._watch.count_as("data_wait", waited)
        return batch
