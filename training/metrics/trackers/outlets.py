"""Events of a run, passed to files and services that must never delay it.

`metrics.jsonl` of the attempt is always written: one JSON object a line, `kind` ("config", "step",
"evaluation", "sample" or the name of an event), `time` (Unix) and the fields of
`training.metrics.recorder` and others. TensorBoard, Weights & Biases and trackio come on top where
the configuration names them and they are installed (the extras of those names).

The rule: whatever a tracker does, the run does not notice. `log` appends to a queue and returns.
Every tracker has its own daemon thread and its own queue, which drops its oldest entries and counts
them when the tracker is slower than the run; an exception ends that tracker with one warning, in
the log and among `failures`, for the run to pass on from a thread of its own choice;
`close` waits for all together until its deadline. What is not ours runs in a process of its own
(see `training.metrics.trackers.child_process`), so that neither its threads nor its exit handlers
are the run's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from training.config.validation import TRACKERS as TRACKERS
from training.config.validation import check_trackers as check_trackers
from training.metrics.trackers.child_process import ChildTracker
from training.metrics.trackers.context import Entry, Tracker, TrackerContext
from training.metrics.trackers.files import JsonLines

logger = logging.getLogger(__name__)

CAPACITY = 10_000
EVERY_SECONDS = 1.0


class Outlet:
    """One tracker behind its queue and its thread.

    Args:
        name: for the log.
        make: opens the tracker; called in the thread.
        capacity: entries that may wait.
        every: seconds between two writes.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        capacity: int = CAPACITY,
        every: float = EVERY_SECONDS,
    ) -> None:
        self.name = name
        self.dropped = 0
        self._make = make
        self._capacity = capacity
        self._every = every
        self._lock = threading.Lock()
        self._queue: deque[Entry] = deque()
        self._failure = ""
        self._tracker: Tracker | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Queue an entry; the oldest goes when there is no room."""
        with self._lock:
            if self._failure:
                self.dropped += 1
                return
            if len(self._queue) >= self._capacity:
                self._queue.popleft()
                self.dropped += 1
            self._queue.append(entry)

    @property
    def failure(self) -> str:
        """What disabled the tracker; empty while it works."""
        return self._failure

    def begin_to_close(self) -> None:
        """Let the thread write what is queued and finish."""
        self._closing.set()

    def finish(self, seconds: float) -> None:
        """Wait that long for the end, and leave it behind then."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            logger.warning("tracker %s: not done in time, given up", self.name)
            tracker, self._tracker = self._tracker, None
            if tracker is not None:
                _quietly(tracker.abandon)
        if self.dropped:
            logger.warning("tracker %s: %d entries were dropped", self.name, self.dropped)

    def _work(self) -> None:
        try:
            self._tracker = tracker = self._make()
            closing = False
            while not closing:
                closing = self._closing.wait(self._every)
                tracker.write(self._take())
            tracker.close()
        except BaseException as error:  # noqa: BLE001 - a tracker may fail as it likes
            failure = _sentence(error)
            logger.warning("tracker %s: disabled: %s", self.name, failure)
            with self._lock:
                self._failure = failure
                self.dropped += len(self._queue)
                self._queue.clear()
            if self._tracker is not None:
                _quietly(self._tracker.abandon)

    def _take(self) -> list[Entry]:
        with self._lock:
            entries = list(self._queue)
            self._queue.clear()
        return entries


def _quietly(action: Callable[[], Any]) -> None:
    try:
        action()
    except Exception:
        logger.debug("giving up a tracker failed", exc_info=True)


def _sentence(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:500]}" if words else type(error).__name__


class Trackers:
    """All trackers of a run behind one `log`.

    Args:
        outlets: where entries go.
    """

    def __init__(self, outlets: Sequence[Outlet] = ()) -> None:
        self._outlets = tuple(outlets)

    def log(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Tell every tracker; returns at once and raises nothing. The fields are copied."""
        entry = {"kind": kind, "time": round(time.time(), 3), **fields}
        for outlet in self._outlets:
            outlet.put(entry)

    def close(self, seconds: float = 15.0) -> None:
        """Let all finish at the same time, for so long together and no longer."""
        deadline = time.monotonic() + seconds
        for outlet in self._outlets:
            outlet.begin_to_close()
        for outlet in self._outlets:
            outlet.finish(deadline - time.monotonic())

    @property
    def failures(self) -> dict[str, str]:
        """What disabled each tracker that is."""
        return {outlet.name: outlet.failure for outlet in self._outlets if outlet.failure}

    @property
    def dropped(self) -> dict[str, int]:
        """Entries that each tracker never got."""
        return {outlet.name: outlet.dropped for outlet in self._outlets}


def open_trackers(names: Sequence[str], context: TrackerContext) -> Trackers:
    """`metrics.jsonl` and the trackers of these names, each begun in its thread.

    Raises:
        InputError: a name is not one of `TRACKERS`.
    """
    check_trackers("trackers", names)
    outlets = [Outlet("jsonl", lambda: JsonLines(context.directory))]
    outlets += [Outlet(name, lambda name=name: ChildTracker(name, context)) for name in names]
    trackers = Trackers(outlets)
    trackers.log("config", {"run": context.run, "attempt": context.attempt, **context.config})
    return trackers
