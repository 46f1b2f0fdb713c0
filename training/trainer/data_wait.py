"""How long the devices waited for batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from training.metrics.stopwatch import Stopwatch

BEHIND_SECONDS = 1e-3
"""A batch that was waited for longer shows that the loader does not keep up."""


class TimedBatches:
    """The loader's batches, with the time the devices waited for them in `data_wait`.

    While the newest step still runs on the devices, waiting for a batch costs nothing and is part
    of `step`. Where a batch was waited for and the step was done when it came, the wait counts;
    how much of it the step had covered is not known. So from then on, until the loader keeps up
    again, the step is waited for first (with an empty queue of batches that delays nothing but
    the hand-over of the next one), and only what comes after it counts.

    Args:
        batches: the loader.
        watch: in `step` while the loop runs.
        clock: as the watch's.
        ready: whether a JAX array has been computed.
        settle: waits for one.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        watch: Stopwatch,
        clock: Callable[[], int] = time.perf_counter_ns,
        ready: Callable[[Any], bool] = lambda array: array.is_ready(),
        settle: Callable[[Any], Any] = lambda array: array.block_until_ready(),
    ) -> None:
        self._batches = iter(batches)
        self._watch = watch
        self._clock = clock
        self._ready = ready
        self._settle = settle
        self._running: Any = None
        self._behind = False
        self._waited = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def set_inflight(self, array: Any) -> None:
        """Say which array the step that was just queued will compute; None for no step."""
        self._running = array

    def pop_data_wait(self) -> float:
        """Seconds of `data_wait` since this was asked before."""
        waited, self._waited = self._waited, 0
        return waited / 1e9

    def __next__(self) -> Any:
        running = self._running
        if self._behind and running is not None:
            self._settle(running)
        began = self._clock()
        batch = next(self._batches)
        waited = self._clock() - began
        missed = running is None or self._ready(running)
        self._behind = missed and running is not None and waited > BEHIND_SECONDS * 1e9
        if missed:
            self._watch.count_as("data_wait", waited)
            self._waited += waited
        return batch
