"""A step's fan-out on Ray: shards as tasks, each retried when its worker is lost.

Ray's own retries are always off: it would run a task that kills its worker three times without a
report. This module retries a lost shard, in a separate directory, and counts its tries.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from pipeline.errors import Cancelled, WorkerLost, text_of
from pipeline.execute.ray import runtime_env
from pipeline.execute.ray.gang import Reports, run_gang
from pipeline.execute.ray.heartbeat import FailureDetector, Heartbeat, exit_with_parent
from pipeline.graph.hardware import Hardware
from pipeline.graph.step_context import Emit, ShardTask, write_shard
from pipeline.store import retry
from pipeline.store.shards import Shard

TRIES = 3
_IN_FLIGHT_PER_CPU = 2
_LOOK_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class _Running:
    task: ShardTask
    heartbeat: str
    since: float


def _shard_task(task: ShardTask, collector: Any, heartbeat: str) -> Shard:
    runtime_env.require_same_code()
    runtime_env.require_store(task.ledger.directory)
    exit_with_parent(heartbeat, collector)
    with Heartbeat(collector, heartbeat) as beating:
        if beating.stopping:
            raise Cancelled(f"shard {task.name} was not started")
        with retry.scope(lambda: beating.stopping):
            return write_shard(task)


# Typed as Any: ray.remote adds `.remote` and `.options`, which its annotations lack.
_write: Any = ray.remote(num_cpus=1, max_retries=0)(_shard_task)


class RayWorkers:
    """Workers of a step that itself runs as a Ray task.

    Args:
        collector: the driver's collector (see `ray.heartbeat`).
        label, key: added to events that gang processes emit.
        heartbeat: this step's own heartbeat.
        packages: loggers whose INFO records the logs of gang processes keep.
        wait: seconds that a gang may wait for its hardware; None for no limit.
    """

    def __init__(
        self,
        collector: Any,
        label: str,
        key: str,
        heartbeat: Heartbeat,
        packages: tuple[str, ...] = (),
        wait: float | None = None,
    ) -> None:
        self._collector = collector
        self._stamp = {"step": label, "key": key}
        self._heartbeat = heartbeat
        self._watch = FailureDetector()
        self._packages, self._wait = packages, wait

    @property
    def stopping(self) -> bool:
        """Whether the user asked to stop."""
        return self._heartbeat.stopping

    def map(self, tasks: list[ShardTask], emit: Emit) -> Iterator[Shard]:
        """Write the shards as tasks of one core each, a bounded number in flight."""
        limit = max(1, int(ray.cluster_resources().get("CPU", 1)) * _IN_FLIGHT_PER_CPU)
        waiting, running, look_at = deque(tasks), dict[Any, _Running](), 0.0
        stopped = False  # a shard's worker may receive the cancellation before this step does
        while running or (waiting and not (stopped or self.stopping)):
            if time.monotonic() > look_at:
                waiting.extendleft(self._given_up(running, emit))
                look_at = time.monotonic() + _LOOK_SECONDS
            while waiting and len(running) < limit and not (stopped or self.stopping):
                task = waiting.popleft()
                running.update([self._begin(task)])
            if not running:
                continue  # cancelled since the loop's condition was evaluated
            ready, _ = ray.wait(list(running), num_returns=1, timeout=_LOOK_SECONDS)
            for reference in ready:
                done = running.pop(reference)
                try:
                    yield ray.get(reference)
                except RayTaskError as error:
                    if not isinstance(cause := _cause(error), Cancelled):
                        raise cause from error
                    stopped = True
                    waiting.append(done.task)
                except RayError as error:
                    self._collector.forget.remote(done.heartbeat)
                    waiting.appendleft(
                        _again(done.task, f"its worker died ({text_of(error, 200)})", emit)
                    )
        if waiting:
            raise Cancelled(f"{len(waiting)} shards are not finished")

    def _begin(self, task: ShardTask) -> tuple[Any, _Running]:
        heartbeat = f"{self._heartbeat.name}/{task.name}/{uuid.uuid4().hex[:8]}"
        write = _write.options(label_selector=self._watch.responsive_nodes)
        reference = write.remote(task, self._collector, heartbeat)
        return reference, _Running(task, heartbeat, time.monotonic())

    def _given_up(self, running: dict[Any, _Running], emit: Emit) -> list[ShardTask]:
        """Tasks of unresponsive workers, taken out of `running`, to be retried."""
        ages = ray.get(self._collector.ages.remote(), timeout=self._watch.seconds)
        lost = self._watch.lost(ages, {r.heartbeat: r.since for r in running.values()})
        tasks = []
        for reference in [reference for reference, r in running.items() if r.heartbeat in lost]:
            ray.cancel(reference, force=True)
            done = running.pop(reference)
            if lost[done.heartbeat]:
                tasks.append(_again(done.task, "its worker stopped responding", emit))
            else:  # it has not begun, so this is no try
                self._collector.forget.remote(done.heartbeat)
                tasks.append(done.task)
        return tasks

    def gang(
        self, hardware: Hardware, function: Callable[..., Any], job: Any, emit: Emit, logs: str
    ) -> Any:
        """Run on every process of the hardware at once; process 0's result."""
        reports = Reports(self._collector, self._stamp, logs, self._packages)
        return run_gang(hardware, function, job, emit, reports, self._heartbeat, self._wait)


def _again(task: ShardTask, cause: str, emit: Emit) -> ShardTask:
    """The task's next try. Raises `WorkerLost` when it has had `TRIES`."""
    if task.number >= TRIES:
        raise WorkerLost(f"shard {task.name}: {cause}, {task.number} times in a row")
    emit({"event": "shard_retried", "shard": task.name, "cause": cause, "tries": task.number})
    return dataclasses.replace(task, number=task.number + 1)


def _cause(error: RayTaskError) -> BaseException:
    return error.cause if isinstance(error.cause, BaseException) else error
