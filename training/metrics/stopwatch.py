"""A stopwatch that divides the wall time of one attempt into buckets; exactly one is running.

    init        from the start until the first batch is requested, restore included
    compile     waiting for the compilation of the train step
    data_wait   the devices were idle because the next batch was not ready (see `TimedBatches`)
    step        training: queueing steps, reading their metrics, waiting for the devices
    skipped     the same for steps that were not applied (see `training.step.train_step`)
    evaluation  scoring held-out splits, compilation included
    checkpoint  the part of a save that blocks the training loop
    samples     generating samples from prompts
    other       profiles, tracing and everything else

Whole nanoseconds are counted, so buckets add up to the wall time exactly. Beside them it times the
parts of the startup, from the gang's start to the end of its first step:

    starting     start of the gang's processes, on hardware that is ready
    importing    import of the trainer and its libraries
    joining      the processes connect and find their devices
    restoring    restore or initialisation of the state, while the step is compiled or loaded
    compiling    the rest of that compilation or load
    evaluation   scoring of new parameters before the first step
    first batch  wait for the loader's first batch
    first step   until its metrics are read

Each part begins where the one before ended; one that did not happen has no entry.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

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
    first waits for the step, and only the wait after it counts: the loader's queue is empty then,
    so this delays only the hand-over of the next batch. `waiting` is the context of the wait for a
    batch, such as `Watchdog.waiting`.
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


BUCKETS = (
    "init",
    "compile",
    "data_wait",
    "step",
    "skipped",
    "evaluation",
    "checkpoint",
    "samples",
    "other",
)
STARTUP = (
    "starting",
    "importing",
    "joining",
    "restoring",
    "compiling",
    "evaluation",
    "first batch",
    "first step",
)


class Stopwatch:
    """Adds elapsed time to the current bucket. One thread switches; any thread may read.

    `clock` returns nanoseconds; `before` has seconds of the startup's parts that ended before.
    """

    def __init__(
        self,
        bucket: str = "init",
        clock: Callable[[], int] = time.perf_counter_ns,
        before: Mapping[str, float] | None = None,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._spent = dict.fromkeys(BUCKETS, 0)
        self._bucket = bucket
        self._since = self._part_since = clock()
        self.startup: Mapping[str, float] = dict(before or {})  # replaced as a whole, never changed

    def switch(self, bucket: str) -> str:
        """Count time from now on in `bucket`; returns the bucket before."""
        assert bucket in BUCKETS, bucket
        with self._lock:
            now = self._clock()
            before = self._bucket
            self._spent[before] += now - self._since
            self._bucket, self._since = bucket, now
        return before

    @contextmanager
    def during(self, bucket: str) -> Iterator[None]:
        """A context that counts its time in `bucket`, then continues the bucket before."""
        before = self.switch(bucket)
        try:
            yield
        finally:
            self.switch(before)

    def count_as(self, bucket: str, nanoseconds: int) -> None:
        """Move the last `nanoseconds` from the current bucket, but none before the last switch."""
        with self._lock:
            now = self._clock()
            moved = min(max(0, nanoseconds), now - self._since)
            self._spent[self._bucket] += now - self._since - moved
            self._spent[bucket] += moved
            self._since = now

    def move(self, bucket: str, to: str, nanoseconds: int) -> None:
        with self._lock:
            self._spent[bucket] -= nanoseconds
            self._spent[to] += nanoseconds

    def nanoseconds(self) -> dict[str, int]:
        """Nanoseconds of each bucket until now; their sum is exactly the time since the start."""
        with self._lock:
            spent = dict(self._spent)
            spent[self._bucket] += self._clock() - self._since
        return spent

    def seconds(self) -> dict[str, float]:
        return {bucket: spent / 1e9 for bucket, spent in self.nanoseconds().items()}

    def ended(self, part: str) -> None:
        """End a part of the startup and begin the next one; no effect where it, or all, ended."""
        if part in self.startup or STARTUP[-1] in self.startup:
            return
        now = self._clock()
        self.startup = {**self.startup, part: (now - self._part_since) / 1e9}
        self._part_since = now
