"""All that looks at a run, behind one object that the loop tells what it does.

Process 0 keeps the journal, feeds the trackers and takes profiles; in the others every call does
nothing but keep time. Nothing here waits for a device or a store, and nothing raises.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from pipeline.store import storage
from training.config.job import MetricsRow, TrainJob
from training.metrics.journal import Journal
from training.metrics.profiler import Profiler
from training.metrics.stopwatch import Stopwatch
from training.metrics.trackers.context import TrackerContext
from training.metrics.trackers.outlets import Trackers, open_trackers

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 15.0
JOURNAL_SECONDS = 5.0
PREEMPTED_SECONDS = 2.0


class Observer:
    """Journal, trackers and profiler of one attempt.

    Args:
        job: its `run_directory` is where `metrics.jsonl`, traces and trackers' files go, its
            `journal_directory` where the accounts of all attempts are. Without the one or the
            other, what would be there is not written.
        watch: of this attempt.
        leader: whether this is process 0.
        device, devices, processes: what the run is on.
        warn: called with a line about each tracker that was disabled; by `row` and `close`, in the
            thread that calls them.

    Attributes:
        watch: the stopwatch, for `watch.during(...)`.
    """

    def __init__(
        self,
        job: TrainJob,
        watch: Stopwatch,
        *,
        leader: bool = True,
        device: str = "",
        devices: int = 0,
        processes: int = 1,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.watch = watch
        self._warn = warn
        self._warned: set[str] = set()
        self._journal: Journal | None = None
        self._profiler: Profiler | None = None
        self._trackers = Trackers()
        if leader and job.journal_directory:
            self._journal = Journal(
                job.journal_directory,
                job.attempt,
                watch,
                device=device,
                devices=devices,
                processes=processes,
            )
        if leader and job.run_directory:
            self._trackers = open_trackers(job.train.trackers, _context(job))
            self._profiler = Profiler(job.run_directory, job.train.profile)

    def began(self, step: int) -> None:
        """The state is there: of the checkpoint of `step`, or a new one at 0."""
        if self._journal is not None:
            self._journal.begin(step)
        self._trackers.log("began", {"step": step})

    def row(self, row: MetricsRow) -> None:
        """A step's metrics are known."""
        if self._journal is not None:
            self._journal.step(int(row["step"]))
        self._trackers.log("step", row)
        self._pass_on_failures()

    def saved(self, step: int) -> None:
        """The state after `step` was taken for a checkpoint; it may still be on its way."""
        if self._journal is not None:
            self._journal.mark(step)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """An evaluation, a sample or anything else that happened."""
        self._trackers.log(kind, fields)

    def profile(self, step: int, pause: Callable[[], AbstractContextManager[None]]) -> None:
        """Begin or end a trace before `step` is queued, when one is asked for.

        Args:
            step: the one that is about to be queued.
            pause: waits for the step before; the time inside belongs to no step.
        """
        if self._profiler is not None and self._profiler.due(step):
            with pause(), self.watch.during("other"):
                self._profiler.before(step)

    def close(self, outcome: str) -> None:
        """End everything; takes 35 seconds at most, and 6 when the machine is about to be taken.

        Args:
            outcome: "finished", "preempted" or "failed".
        """
        seconds = PREEMPTED_SECONDS if outcome == "preempted" else CLOSE_SECONDS
        if self._profiler is not None:
            self._profiler.close(seconds)
        self._trackers.close(seconds)
        self._pass_on_failures()
        # Last, so that the account has the time that the others took.
        if self._journal is not None:
            self._journal.close(outcome, min(seconds, JOURNAL_SECONDS))

    def _pass_on_failures(self) -> None:
        if self._warn is None:
            return
        for name, reason in self._trackers.failures.items():
            if name in self._warned:
                continue
            self._warned.add(name)
            try:
                self._warn(f"tracker {name} is off, the run continues without it: {reason}")
            except Exception:
                logger.warning("tracker %s: its failure was not passed on", name, exc_info=True)


def _context(job: TrainJob) -> TrackerContext:
    parts = ("model", "optimizer", "train")
    return TrackerContext(
        directory=job.run_directory,
        run=job.name or storage.normalise(job.run_directory).rpartition("/")[2],
        attempt=job.attempt,
        # A run that is built anew has another directory for its attempts' accounts.
        build=job.journal_directory.rstrip("/").rpartition("/")[2],
        config={part: dataclasses.asdict(getattr(job, part)) for part in parts},
    )
