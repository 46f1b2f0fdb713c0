"""The context of one attempt: callbacks, metrics log, journal, stopwatches, stop signal, watchdog.

The caller creates a `RunContext` with its callbacks and the trainer opens it. The trainer reports
every event to it once, and it forwards the event to `metrics.jsonl`, the journal and the callbacks.
Only process 0 writes these files and takes profiles; the other processes only measure time.
Nothing here waits for a device, and only a metrics log that cannot be opened raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Any

import jax

from training.checkpoint.checkpointer import Commit
from training.config.job import MetricsRow, TrainJob
from training.fault.preemption import StopSignal
from training.fault.watchdog import Board, Watchdog
from training.metrics.journal import Journal
from training.metrics.metrics_log import MetricsLog
from training.metrics.profiler import TRACE_SECONDS, Profiler
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
    """The default callback: does nothing."""


@dataclass(kw_only=True, eq=False)
class RunContext:
    """One attempt of a run.

    Args:
        coordinator: coordinator of the processes; None for a single process.
        on_commit: called with (step, path) of a complete checkpoint; writes its record. Process 0,
            in a thread.
        on_drop: called with (step, path) of a checkpoint about to be deleted, or found corrupt
            while an older one is sound; removes its record. Process 0.
        on_progress: called with (step, steps, row) every `log_every` steps. Process 0.
        on_program: called with a compiled step that is in the store; writes its record. Process 0,
            in a thread.
        before: seconds since the gang's start, by `training.metrics.startup.PARTS`.
        on_event: called with (kind, fields): "corrupt_checkpoint", "failed_checkpoint", "resumed",
            "started_from", "learning_rate", "evaluation", "sample", "tracker" and "preempted" in
            process 0, "watchdog" in any.

    Attributes:
        watch: stopwatch of the attempt, running.
        startup: parts of the time to the first step.
        stop: whether to stop; set by `open`, like `watchdog` and `log`.
        watchdog: ends a process that makes no progress.
        log: the metrics log; None in processes other than 0.
        profiler: takes traces; None in processes other than 0, and without a run directory.
        leader: whether this is process 0.
    """

    coordinator: Coordinator | None = None
    on_commit: Commit = _ignore
    on_drop: Commit = _ignore
    on_progress: Progress = _ignore
    on_event: Event = _ignore
    on_program: OnProgram = _ignore
    before: InitVar[Mapping[str, float] | None] = None
    watch: Stopwatch = field(default_factory=Stopwatch, init=False)
    startup: Startup = field(init=False)
    stop: StopSignal = field(init=False)
    watchdog: Watchdog = field(init=False)
    log: MetricsLog | None = field(default=None, init=False)
    profiler: Profiler | None = field(default=None, init=False)
    leader: bool = field(default=True, init=False)
    _journal: Journal | None = field(default=None, init=False)
    _trackers: Trackers | None = field(default=None, init=False)
    _outcome: str = field(default="failed", init=False)

    def __post_init__(self, before: Mapping[str, float] | None) -> None:
        self.startup = Startup(before)

    @contextmanager
    def open(self, job: TrainJob, *, device: str = "", devices: int = 0) -> Iterator[None]:
        """Open the logs, the stop signal and the watchdog; the whole attempt runs inside.

        An attempt that does not call `end` is recorded as failed.

        Args:
            job: the run.
            device, devices: kind and number of its devices.

        Raises:
            InputError: the attempt has a metrics log already.
        """
        self._job = job
        self.leader = jax.process_index() == 0
        with ExitStack() as stack:
            self.stop = stack.enter_context(StopSignal(many_processes=self.coordinator is not None))
            self.watchdog = stack.enter_context(
                Watchdog(
                    job.train.watchdog_seconds,
                    index=jax.process_index(),
                    count=jax.process_count(),
                    board=Board() if jax.process_count() > 1 else None,
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
            self.profiler = Profiler(job.run_directory, job.train.profile)

    @contextmanager
    def phase(self, name: str, bucket: str = "") -> Iterator[None]:
        """Context for a part of the run other than a step, in which the watchdog is patient.

        Args:
            name: name of the part in the watchdog's reports.
            bucket: bucket of the stopwatch in which its time counts; by default `name`.
        """
        with self.watchdog.phase(name), self.watch.during(bucket or name):
            yield

    def began(self, step: int, *, loaded: bool = False) -> None:
        """Record that the state exists, restored after `step` steps or new at step 0.

        `loaded`: whether the compiled step was loaded from an earlier attempt.
        """
        if self._journal is not None:
            self._journal.begin(step, loaded=loaded)
        if self.log is not None:
            self.log.write("began", {"step": step})

    def row(self, row: MetricsRow) -> None:
        """Record the metrics row of a step."""
        self.startup.ended("first step")
        step, train = int(row["step"]), self._job.train
        if self._journal is not None:
            self._journal.step(step)
        if self.log is not None:
            self.log.write("step", row)
        if self.leader and (step % train.log_every == 0 or step == train.steps):
            self.on_progress(step, train.steps, row)
        if self._trackers is not None:
            self._report(self._trackers.failures())

    def saved(self, step: int) -> None:
        """Record that a checkpoint of `step` was begun; its write may still be in flight."""
        if self._journal is not None:
            self._journal.mark(step)

    def commit(self, step: int, path: str) -> None:
        """Flush the metrics up to a complete checkpoint, then write its record.

        Raises:
            OSError: the store failed.
        """
        if self.log is not None:
            self.log.flush()
        self.on_commit(step, path)

    def event(self, kind: str, **fields: Any) -> None:
        """Log an event, such as an evaluation or a generated sample, and pass it to `on_event`."""
        if self.log is not None:
            self.log.write(kind, fields)
        if self.leader:
            self.on_event(kind, fields)

    def end(self, *, preempted: bool) -> None:
        """Record that the attempt finished or was preempted, and so did not fail."""
        self._outcome = "preempted" if preempted else "finished"

    def _close(self) -> None:
        """Close all parts; takes at most 40 seconds beside a trace, and at most 10 if preempted."""
        preempted = self._outcome == "preempted"
        seconds = PREEMPTED_SECONDS if preempted else CLOSE_SECONDS
        short = min(seconds, SHORT_SECONDS)
        with self.phase("ending", "other"):
            if self.profiler is not None:
                self.profiler.close(seconds, seconds if preempted else TRACE_SECONDS)
            if self.log is not None:
                self.log.close(short)
            if self._trackers is not None:
                self._report(self._trackers.close(seconds))
            if self.log is not None:
                self.log.remove_copy()
            # Closed last, so that the journal counts the time of the other closes.
            if self._journal is not None:
                self._journal.close(self._outcome, short)

    def _report(self, failures: list[str]) -> None:
        for reason in failures:
            logger.warning("%s", reason)
            with contextlib.suppress(Exception):
                self.on_event("tracker", {"reason": reason})

    def _watchdog_ends(self, report: str) -> None:
        self.on_event("watchdog", {"process": jax.process_index(), "report": report})


def tracker_context(job: TrainJob, path: str) -> dict[str, Any]:
    """The description of a run for trackers; `path` is the file of its metrics log."""
    parts = ("model", "optimizer", "train")
    return {
        "path": path,
        "directory": job.run_directory,
        "shared": job.journal_directory or job.run_directory,
        "run": job.name or job.metrics_directory.rstrip("/").rpartition("/")[2],
        # A rebuilt run has a new journal directory, so this name tells the builds apart.
        "build": job.journal_directory.rstrip("/").rpartition("/")[2],
        "config": {part: dataclasses.asdict(getattr(job, part)) for part in parts},
    }
