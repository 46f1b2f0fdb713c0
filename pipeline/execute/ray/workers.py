"""A step's fan-out on Ray: shards as tasks, each retried when its worker is lost.

Not by Ray's own retries, which would run a task that kills its worker three times without a report.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import ray
from ray.exceptions import RayError, RayTaskError

from pipeline import events
from pipeline.errors import Cancelled, WorkerLost, text_of
from pipeline.events import Emit
from pipeline.execute.logs import capture
from pipeline.execute.ray import runtime_env
from pipeline.execute.ray.gang import Reports, run_gang
from pipeline.execute.ray.heartbeat import (
    Channel,
    FailureDetector,
    Heartbeat,
    ended,
    exit_with_parent,
    host_lost,
)
from pipeline.execute.request import Request
from pipeline.graph.hardware import Hardware
from pipeline.graph.step_context import ShardTask, write_shard
from pipeline.store import retry
from pipeline.store.shards import Shard

TRIES = 3
_IN_FLIGHT_PER_CPU = 2
_LOOK_SECONDS = 2.0
_OUTPUT_BYTES = 64 * 1024  # of a shard's writer, at most


@dataclasses.dataclass(frozen=True)
class _RunningTask:
    task: ShardTask
    heartbeat: str
    since: float


def _shard_task(
    task: ShardTask,
    collector: Channel,
    heartbeat: str,
    environment: Mapping[str, str],
    packages: tuple[str, ...],
) -> tuple[Shard, str]:
    """The shard, and the end of what its writer printed and logged."""
    runtime_env.require_same_code()
    runtime_env.require_store(task.ledger.directory)
    exit_with_parent(heartbeat, collector)
    with runtime_env.handed(environment), Heartbeat(collector, heartbeat) as beating:
        if beating.stopping:
            raise Cancelled(f"shard {task.name} was not started")
        with retry.scope(lambda: beating.stopping), tempfile.NamedTemporaryFile() as log:
            try:
                with capture(log.name, redirect=True, packages=packages):
                    shard = write_shard(task)
            except Exception as error:
                if text := _end_of(log):
                    error.add_note(f"output of shard {task.name}:\n{text}")
                raise
            return shard, _end_of(log)


def _end_of(file: IO[bytes]) -> str:
    file.seek(max(0, os.path.getsize(file.name) - _OUTPUT_BYTES))
    return file.read().decode(errors="replace")


# Typed as Any: ray.remote adds `.remote` and `.options`, which its annotations lack.
_write: Any = ray.remote(max_retries=0)(_shard_task)


class RayWorkers:
    """Workers of a step that itself runs as a Ray task."""

    def __init__(
        self,
        collector: Channel,
        request: Request,
        heartbeat: Heartbeat,
        wait: float | None = None,
    ) -> None:
        self._collector, self._request, self._heartbeat = collector, request, heartbeat
        self._watch = FailureDetector()
        self._wait = wait
        self._crashes: Counter[str] = Counter()  # by shard

    @property
    def stopping(self) -> bool:
        return self._heartbeat.stopping

    def map(self, tasks: list[ShardTask], emit: Emit) -> Iterator[Shard]:
        """Write the shards as tasks with the step's resources, a bounded number in flight."""
        waiting, running, look_at, limit = deque(tasks), dict[Any, _RunningTask](), 0.0, 1
        resources = self._request.step.resources
        stopped = False  # a shard's worker may receive the cancellation before this step does
        while running or (waiting and not (stopped or self.stopping)):
            # Now and then: workers that do not respond, and nodes that joined or left.
            if time.monotonic() > look_at:
                waiting.extendleft(self._given_up(running, emit))
                look_at = time.monotonic() + _LOOK_SECONDS
                cores = ray.cluster_resources().get("CPU", 1)
                limit = max(1, int(cores / (resources.shard_cpus or 1) * _IN_FLIGHT_PER_CPU))
            # Some tasks wait at the cluster, so that no core does.
            while waiting and len(running) < limit and not (stopped or self.stopping):
                task = waiting.popleft()
                running.update([self._begin(task)])
            if not running:
                continue  # cancelled since the loop's condition was evaluated
            # A shard, an error of its writer, which is the step's, or a worker that was lost.
            for reference in ended(list(running), _LOOK_SECONDS):
                done = running.pop(reference)
                try:
                    shard, text = ray.get(reference)
                    for line in text.splitlines():
                        sys.stdout.write(f"{shard.name}: {line}\n")  # to the log of this step
                    yield shard
                except RayTaskError as error:
                    if not isinstance(error.cause, Cancelled):
                        raise error.cause or error from error
                    stopped = True
                    waiting.append(done.task)
                except RayError as error:
                    self._collector.send("forget", done.heartbeat)
                    gone = host_lost(error)
                    what = "host was lost" if gone else "worker died"
                    cause = f"its {what} ({text_of(error, 200)})"
                    waiting.appendleft(self._again(done.task, cause, emit, crashed=not gone))
        if waiting:
            raise Cancelled(f"{len(waiting)} shards are not finished")

    def _begin(self, task: ShardTask) -> tuple[Any, _RunningTask]:
        heartbeat = f"{self._heartbeat.name}/{task.name}/{uuid.uuid4().hex[:8]}"
        wants = self._request.step.resources
        write = _write.options(
            num_cpus=wants.shard_cpus,
            memory=wants.shard_memory or None,
            label_selector=self._watch.responsive_nodes,
        )
        about = self._request.environment, self._request.packages
        reference = write.remote(task, self._collector, heartbeat, *about)
        return reference, _RunningTask(task, heartbeat, time.monotonic())

    def _given_up(self, running: dict[Any, _RunningTask], emit: Emit) -> list[ShardTask]:
        """Tasks of unresponsive workers, taken out of `running`, to be retried."""
        seconds = self._watch.seconds
        ages = self._collector.ask("ages", self._heartbeat.name, seconds=seconds)
        if ages is None:
            return []
        lost = self._watch.lost(ages, {r.heartbeat: r.since for r in running.values()})
        tasks = []
        for reference in [reference for reference, r in running.items() if r.heartbeat in lost]:
            ray.cancel(reference, force=True)
            done = running.pop(reference)
            if lost[done.heartbeat]:
                tasks.append(self._again(done.task, "its worker stopped responding", emit))
            else:  # nothing was heard of it, so this is no crash
                self._collector.send("forget", done.heartbeat)
                tasks.append(dataclasses.replace(done.task, number=done.task.number + 1))
        return tasks

    def _again(self, task: ShardTask, cause: str, emit: Emit, *, crashed: bool = True) -> ShardTask:
        """The task's next try. Raises `WorkerLost` when it has crashed `TRIES` times."""
        self._crashes[task.name] += crashed
        tries = self._crashes[task.name]
        if tries >= TRIES:
            raise WorkerLost(f"shard {task.name}: {cause}, {tries} times in a row")
        emit(events.ShardRetried(task.name, cause, tries))
        return dataclasses.replace(task, number=task.number + 1)

    def gang(
        self, hardware: Hardware, function: Callable[..., Any], job: Any, emit: Emit, logs: str
    ) -> Any:
        request = self._request
        stamp = {"step": request.label, "key": request.key}
        reports = Reports(self._collector, stamp, logs, request.packages, request.environment)
        return run_gang(hardware, function, job, emit, reports, self._heartbeat, self._wait)
