"""What the trainer is given beside its job: who hears of the run, what times it, what may end it.

One `RunContext` for one attempt. The caller makes it with the functions that it wants called; the
trainer opens it, and what happens in the run goes through it once: to `metrics.jsonl`, the journal
and the caller. Process 0 alone keeps these and takes profiles; in the others the calls keep time.
Nothing here waits for a device, and only a metrics log that cannot be opened raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax

from training.checkpoint.checkpointer import Commit
from training.config.job import MetricsRow, TrainJob
from training.fault.preemption import StopSignal
from training.fault.watchdog import CoordinationBoard, Watchdog
from training.metrics.journal import Journal
from training.metrics.metrics_log import MetricsLog
from training.metrics.profiler import Profiler
from training.metrics.startup import Startup
from training.metrics.stopwatch import Stopwatch
from training.metrics.trackers.children import Trackers
from training.sharding.distributed import Coordinator
from training.trainer.kept_program import OnProgram

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 15.0
SHORT_SECONDS = 5.0
PREEMPTED_SECONDS = 2.0

Progress = Callable[[int, int, MetricsRow], None]
Event = Callable[[str, dict[str, Any]], None]


def _ignore(*_: Any) -> None:
    """What a caller wants to hear nothing of."""


class RunContext:
    """One attempt at a run.

    Args:
        coordinator: where the processes meet; None for a single process.
        on_commit: (step, path) of a complete checkpoint; write its record. Process 0, in a thread.
        on_drop: (step, path) of a checkpoint about to be deleted, or found damaged beside a sound
            older one; remove its record. Process 0.
        on_progress: (step, steps, row) every `log_every` steps. Process 0.
        on_program: a compiled step is in the store; write its record. Process 0, in a thread.
        before: seconds since the gang's start, by `training.metrics.startup.PARTS`.
        on_event: (kind, fields): "damaged_checkpoint", "failed_checkpoint", "resumed",
            "started_from", "evaluation", "sample", "tracker" and "preempted" in process 0,
            "watchdog" in any.

    Attributes:
        watch: stopwatch of the attempt, running.
        startup: parts of the time to the first step.
        stop: whether to stop; after `open`, as the following.
        watchdog: what ends a process that makes no progress.
        log: the metrics log; None in processes other than 0.
        leader: whether this is process 0.
    """

    stop: StopSignal
    watchdog: Watchdog

    def __init__(
        self,
        *,
        coordinator: Coordinator | None = None,
        on_commit: Commit = _ignore,
        on_drop: Commit = _ignore,
        on_progress: Progress = _ignore,
        on_event: Event = _ignore,
        on_program: OnProgram | None = None,
        before: Mapping[str, float] | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.on_drop = on_drop
        self.on_program = on_program
        self._on_commit = on_commit
        self._on_progress = on_progress
        self._on_event = on_event
        self.watch = Stopwatch()
        self.startup = Startup(before)
        self.leader = True
        self.log: MetricsLog | None = None
        self._journal: Journal | None = None
        self._profiler: Profiler | None = None
        self._trackers: Trackers | None = None
        self._outcome = "failed"

    @contextmanager
    def open(self, job: TrainJob, *, device: str = "", devices: int = 0) -> Iterator[None]:
        """Everything runs inside; `end` says how the attempt ended, which else has failed.

        Args:
            job: the run.
            device, devices: kind and number of what it is on.

        Raises:
            InputError: the attempt has a metrics log already.
        """
        self._job, many = job, jax.process_count() > 1
        self.leader = jax.process_index() == 0
        with ExitStack() as stack:
            self.stop = stack.enter_context(StopSignal(many_processes=self.coordinator is not None))
            self.watchdog = stack.enter_context(
                Watchdog(
                    job.train.watchdog_seconds,
                    index=jax.process_index(),
                    count=jax.process_count(),
                    board=CoordinationBoard() if many else None,
                    on_end=self._watchdog_ends,
                )
            )
            if self.leader:
                self._open_files(job, device, devices)
            stack.callback(self._close)
            yield

    def _open_files(self, job: TrainJob, device: str, devices: int) -> None:
        self.log = MetricsLog(job.metrics_directory)
        context = tracker_context(job, self.log.path)
        names = {"run": context["run"], "attempt": job.attempt}
        self.log.write("config", {**names, **context["config"]})
        if job.journal_directory:
            self._journal = Journal(
                job.journal_directory,
                job.attempt,
                self.watch,
                self.startup,
                device=device,
                devices=devices,
                processes=jax.process_count(),
            )
        if job.run_directory:
            self._trackers = Trackers(job.train.trackers, context)
            self._profiler = Profiler(job.run_directory, job.train.profile)

    def began(self, step: int, *, loaded: bool = False) -> None:
        """The state is there: of the checkpoint of `step`, or a new one at 0.

        `loaded` says whether its compiled step is an earlier attempt's.
        """
        if self._journal is not None:
            self._journal.begin(step, loaded=loaded)
        if self.log is not None:
            self.log.write("began", {"step": step})

    def row(self, row: MetricsRow) -> None:
        """A step's metrics are known."""
        self.startup.ended("first step")
        step, train = int(row["step"]), self._job.train
        if self._journal is not None:
            self._journal.step(step)
        if self.log is not None:
            self.log.write("step", row)
        if self.leader and (step % train.log_every == 0 or step == train.steps):
            self._on_progress(step, train.steps, row)
        if self._trackers is not None:
            self._report(self._trackers.failures())

    def saved(self, step: int) -> None:
        """The state after `step` was taken for a checkpoint; it may still be on its way."""
        if self._journal is not None:
            self._journal.mark(step)

    def commit(self, step: int, path: str) -> None:
        """A checkpoint is complete: store the metrics that belong to it, then record it.

        Raises:
            OSError: the store failed.
        """
        if self.log is not None:
            self.log.flush()
        self._on_commit(step, path)

    def event(self, kind: str, **fields: Any) -> None:
        """An evaluation, a sample or anything else that happened."""
        if self.log is not None:
            self.log.write(kind, fields)
        if self.leader:
            self._on_event(kind, fields)

    def profile(self, step: int, pause: Callable[[], AbstractContextManager[None]]) -> None:
        """Begin or end a trace before `step` is queued, when one is asked for.

        Args:
            step: the one that is about to be queued.
            pause: waits for the step before; the time inside belongs to no step.
        """
        if self._profiler is not None and self._profiler.due(step):
            with pause(), self.watch.during("other"):
                self._profiler.before(step)

    def end(self, *, preempted: bool) -> None:
        """The attempt has done what it could."""
        self._outcome = "preempted" if preempted else "finished"

    def _close(self) -> None:
        """End everything; takes 45 seconds at most, and 8 when the machine is about to be taken."""
        seconds = PREEMPTED_SECONDS if self._outcome == "preempted" else CLOSE_SECONDS
        short = min(seconds, SHORT_SECONDS)
        with self.watchdog.phase("ending"):
            if self._profiler is not None:
                self._profiler.close(seconds)
            if self.log is not None:
                self.log.close(short)
            if self._trackers is not None:
                self._report(self._trackers.close(seconds))
            # Last, so that the account has the time that the others took.
            if self._journal is not None:
                self._journal.close(self._outcome, short)

    def _report(self, failures: list[str]) -> None:
        for reason in failures:
            logger.warning("%s", reason)
            with contextlib.suppress(Exception):
                self._on_event("tracker", {"reason": reason})

    def _watchdog_ends(self, report: str) -> None:
        self._on_event("watchdog", {"process": jax.process_index(), "report": report})


def tracker_context(job: TrainJob, path: str) -> dict[str, Any]:
    """What trackers get of a run, whose metrics log is the file `path`."""
    parts = ("model", "optimizer", "train")
    return {
        "path": path,
        "directory": job.run_directory,
        "run": job.name or job.metrics_directory.rstrip("/").rpartition("/")[2],
        # A run that is built anew has another directory for its attempts' accounts.
        "build": job.journal_directory.rstrip("/").rpartition("/")[2],
        "config": {part: dataclasses.asdict(getattr(job, part)) for part in parts},
    }
