"""What surrounds the loop of one attempt: metrics log, trackers, stopwatch, stop signal, watchdog.

The trainer reports every event to a `RunContext`, which forwards it to `metrics.jsonl` and to the
caller's `Listener`. Only process 0 writes files and takes profiles. Nothing here waits for a
device, and only a metrics log that cannot be opened raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from training.config.job import Listener, MetricsRow, TrainJob
from training.fault import Board, StopSignal, Watchdog
from training.metrics.metrics_log import MetricsLog
from training.metrics.profiler import TRACE_SECONDS, Profiler
from training.metrics.stopwatch import Stopwatch
from training.metrics.trackers import Trackers

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 15.0
SHORT_SECONDS = 5.0
PREEMPTED_SECONDS = 2.0


@contextmanager
def run_context(
    job: TrainJob,
    listener: Listener | None = None,
    watch: Stopwatch | None = None,
    *,
    device: str = "",
    devices: int = 0,
) -> Iterator[RunContext]:
    """The context of an attempt on `devices` devices of the kind `device`.

    It is recorded as failed unless it calls `end`.
    """
    listener = listener or Listener()
    index, count = jax.process_index(), jax.process_count()

    def ends(report: str) -> None:
        listener.event("watchdog", process=index, report=report)

    board, seconds = Board() if count > 1 else None, job.train.watchdog_seconds
    with (
        StopSignal(many_processes=count > 1) as stop,
        Watchdog(seconds, index=index, count=count, board=board, on_end=ends) as watchdog,
    ):
        hardware = {"device": device, "devices": devices, "processes": count}
        run = RunContext(job, listener, watch or Stopwatch(), stop, watchdog, hardware)
        try:
            yield run
        finally:
            run.close()


class RunContext(Listener):
    """One attempt of a run. Its leader, process 0, has `log`, and `profiler` with a directory."""

    def __init__(
        self,
        job: TrainJob,
        listener: Listener,
        watch: Stopwatch,
        stop: StopSignal,
        watchdog: Watchdog,
        hardware: dict[str, Any],
    ) -> None:
        self.watch, self.stop, self.watchdog = watch, stop, watchdog
        self.leader = jax.process_index() == 0
        self.log: MetricsLog | None = None
        self.profiler: Profiler | None = None
        self._train, self._listener = job.train, listener
        self._trackers: Trackers | None = None
        self._outcome = "failed"
        self._step = 0
        if not self.leader:
            return
        self.log = MetricsLog(job.metrics_directory, self._times)
        context = tracker_context(job, self.log.path)
        names = {"run": context["run"], "attempt": job.attempt, "build": job.build}
        self.log.write("config", {**names, **hardware, **context["config"]})
        self.log.write("time", self._times())
        if job.run_directory:
            self._trackers = Trackers(job.train.trackers, context)
            self.profiler = Profiler(job.run_directory, job.train.profile)

    @contextmanager
    def phase(self, name: str, bucket: str = "") -> Iterator[None]:
        """Context for a part of the run other than a step, in which the watchdog is patient.

        Its time counts in `bucket` of the stopwatch, by default that of its name.
        """
        with self.watchdog.phase(name), self.watch.during(bucket or name):
            yield

    def began(self, step: int, *, loaded: bool = False) -> None:
        """Record that the state exists; `loaded` where an earlier attempt had compiled the step."""
        self._step = step
        if self.log is not None:
            self.log.write("began", {"step": step, "loaded": loaded})

    def row(self, row: MetricsRow) -> None:
        """Record the metrics row of a step."""
        self.watch.ended("first step")
        self._step = step = int(row["step"])
        if self.log is not None:
            self.log.write("step", row)
        if self.leader and (step % self._train.log_every == 0 or step == self._train.steps):
            self._listener.progress(step, self._train.steps, row)
        if self._trackers is not None:
            self._report(self._trackers.failures())

    def saved(self, step: int) -> None:
        """Record that the state after `step` was just copied for a checkpoint.

        The time of the copy counts, not that of the commit: an attempt that resumes from the
        checkpoint redoes the steps in between.
        """
        self._step = step
        if self.log is not None:
            self.log.write("time", {**self._times(), "saved": True})

    def commit(self, step: int, path: str) -> None:
        """Flush the metrics up to a complete checkpoint, then have its record written."""
        if self.log is not None:
            self.log.flush()
        self._listener.commit(step, path)

    def drop(self, step: int, path: str) -> None:
        self._listener.drop(step, path)

    def event(self, kind: str, **fields: Any) -> None:
        """Log an event, such as an evaluation or a generated sample, and pass it on."""
        if self.log is not None:
            self.log.write(kind, fields)
        if self.leader:
            self._listener.event(kind, **fields)

    def end(self, *, preempted: bool) -> None:
        """Record that the attempt finished or was preempted, and so did not fail."""
        self._outcome = "preempted" if preempted else "finished"

    def close(self) -> None:
        """Close all parts; takes at most 40 seconds beside a trace, and at most 10 if preempted."""
        preempted = self._outcome == "preempted"
        seconds = PREEMPTED_SECONDS if preempted else CLOSE_SECONDS
        with self.phase("ending", "other"):
            if self.profiler is not None:
                self.profiler.close(seconds, seconds if preempted else TRACE_SECONDS)
            if self.log is None:
                return
            if self._trackers is not None:  # they read the local file to its end
                with contextlib.suppress(OSError):
                    self.log.append()
                self._report(self._trackers.close(seconds))
            # Written last, so that the account has the time of the other closes.
            self.log.write("time", {**self._times(), "outcome": self._outcome})
            self.log.close(min(seconds, SHORT_SECONDS))

    def _times(self) -> dict[str, Any]:
        """The fields of a row of kind "time", see `training.metrics.goodput`."""
        return {"step": self._step, "buckets": self.watch.seconds(), "startup": self.watch.startup}

    def _report(self, failures: list[str]) -> None:
        for reason in failures:
            logger.warning("%s", reason)
            with contextlib.suppress(Exception):
                self._listener.event("tracker", reason=reason)


def tracker_context(job: TrainJob, path: str) -> dict[str, Any]:
    """The description of a run for trackers; `path` is the file of its metrics log."""
    parts = ("model", "optimizer", "train")
    return {
        "path": path,
        "directory": job.run_directory,
        "shared": job.shared_directory or job.run_directory,
        "run": job.name or job.metrics_directory.rstrip("/").rpartition("/")[2],
        "build": job.build,
        "config": {part: dataclasses.asdict(getattr(job, part)) for part in parts},
    }
