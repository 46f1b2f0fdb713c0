"""Where the wall time of one attempt goes: a stopwatch that is always in exactly one bucket.

    init        from the beginning until the first batch is asked for, restore included
    compile     waiting for the train step's compiler
    data_wait   the devices had nothing to do because the next batch was not there (see `Feed`)
    step        training: queueing steps, reading their numbers, waiting for the devices
    evaluation  scoring held-out text, its compilation included
    checkpoint  the part of saving that keeps the loop waiting
    samples     writing text from prompts
    other       profiles, tracing and whatever else has no name

Time is counted in whole nanoseconds, so buckets add up to the wall time exactly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pipeline.errors import InputError

BUCKETS = ("init", "compile", "data_wait", "step", "evaluation", "checkpoint", "samples", "other")
BEHIND_SECONDS = 1e-3
"""A batch that was waited for longer shows that the loader does not keep up."""


class Stopwatch:
    """Adds the time that passes to the bucket it is in.

    One thread switches; any thread may read.

    Args:
        bucket: the first one.
        clock: nanoseconds of a clock that never goes back.
    """

    def __init__(
        self, bucket: str = "init", clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._spent = dict.fromkeys(BUCKETS, 0)
        self._bucket = _known(bucket)
        self._since = clock()

    def switch(self, bucket: str) -> str:
        """Time from now on belongs to `bucket`; returns the one before.

        Raises:
            InputError: there is no such bucket.
        """
        _known(bucket)
        with self._lock:
            now = self._clock()
            before = self._bucket
            self._spent[before] += now - self._since
            self._bucket, self._since = bucket, now
        return before

    def during(self, bucket: str) -> _During:
        """A context whose time belongs to `bucket`; the bucket before goes on after it."""
        return _During(self, _known(bucket))

    def count_as(self, bucket: str, nanoseconds: int) -> None:
        """Count the last so many nanoseconds as `bucket`'s, since the last switch at most."""
        with self._lock:
            now = self._clock()
            moved = min(max(0, nanoseconds), now - self._since)
            self._spent[self._bucket] += now - self._since - moved
            self._spent[bucket] += moved
            self._since = now

    def nanoseconds(self) -> dict[str, int]:
        """What each bucket has until now; the sum is the time since the beginning, exactly."""
        with self._lock:
            spent = dict(self._spent)
            spent[self._bucket] += self._clock() - self._since
        return spent

    def seconds(self) -> dict[str, float]:
        """The same in seconds."""
        return {bucket: spent / 1e9 for bucket, spent in self.nanoseconds().items()}


class _During:
    """Written as a class because generators cost a step of a small model more than they should."""

    __slots__ = ("_before", "_bucket", "_watch")

    def __init__(self, watch: Stopwatch, bucket: str) -> None:
        self._watch = watch
        self._bucket = bucket

    def __enter__(self) -> None:
        self._before = self._watch.switch(self._bucket)

    def __exit__(self, *_: object) -> None:
        self._watch.switch(self._before)


def _known(bucket: str) -> str:
    if bucket not in BUCKETS:
        raise InputError(f"expected one of the buckets {', '.join(BUCKETS)}, got {bucket!r}")
    return bucket


class Feed:
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

    def runs(self, array: Any) -> None:
        """Say which array the step that was just queued will compute; None for no step."""
        self._running = array

    def take_waited(self) -> float:
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
