"""Where the wall time of one attempt goes: a stopwatch that is always in exactly one bucket.

    init        from the beginning until the first batch is asked for, restore included
    compile     waiting for the train step's compiler
    data_wait   the devices had nothing to do because the next batch was not there (see
                `training.trainer.data_wait`)
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
from collections.abc import Callable

from pipeline.errors import InputError

BUCKETS = ("init", "compile", "data_wait", "step", "evaluation", "checkpoint", "samples", "other")


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
        """A context whose time belongs to `bucket`; the bucket before continues after it."""
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
