"""A gang on Ray: one process per host of the hardware, all of them or none.

The loss of one process, or a timeout of its heartbeats, ends them all.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from pipeline.errors import (
    Cancelled,
    CorruptOutput,
    InputError,
    PonenteError,
    Preempted,
    ResourcesUnavailable,
    StoreUnavailable,
    WorkerLost,
    text_of,
)
from pipeline.events import Emit
from pipeline.execute.backend import InlineWorkers
from pipeline.execute.logs import capture
from pipeline.execute.ray import runtime_env
from pipeline.execute.ray.heartbeat import (
    Channel,
    FailureDetector,
    Heartbeat,
    HeartbeatAges,
    emitter,
    host_lost,
    terminate_self,
)
from pipeline.execute.ray.placement import HardwareWait, placed
from pipeline.graph.hardware import Hardware
from pipeline.graph.step_context import GangProcess
from pipeline.store import storage
from pipeline.store.shards import ATTEMPTS

_BEGIN_SECONDS = 120.0  # start-up deadline of a process with reserved resources
_LOOK_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 1.0  # after the first unexpected error
_FATE_SECONDS = 30.0  # for Ray to learn how a process was lost
_LATE_SECONDS = 2.0  # a heartbeat may arrive this long after its process died

logger = logging.getLogger("ponente")

# Errors that the executor distinguishes: an error of a process is raised in the step as the same.
_TOLD = InputError, CorruptOutput, StoreUnavailable, Preempted, ResourcesUnavailable, WorkerLost
_KINDS: dict[str, type[PonenteError]] = {kind.__name__: kind for kind in _TOLD}


@dataclasses.dataclass(frozen=True)
class Reports:
    """Where the processes of a gang send their events and logs."""

    collector: Channel
    stamp: Mapping[str, str]
    logs: str
    packages: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)


def _answer(work: Callable[[], Any]) -> tuple[str, Any]:
    """What `work` returns, or its error as data, so that no exception has to be unpickled."""
    try:
        return "done", work()
    except PonenteError as error:
        kinds = (name for name, kind in _KINDS.items() if isinstance(error, kind))
        return next(kinds, PonenteError.__name__), str(error)
    except Exception as error:  # noqa: BLE001 - returned as text and raised in the step
        passes = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        return "OSError" if passes else "error", traceback.format_exc()


class _GangProcess:
    """One process of a gang, with these environment variables from before its job is loaded."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        os.environ.update(environment or {})

    def coordinator(self) -> str:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def run(
        self,
        function: Callable[..., Any],
        job: Any,
        process: GangProcess,
        reports: Reports,
        heartbeat: str,
        environment: Mapping[str, str],
    ) -> tuple[str, Any]:
        """Call the function; see `_answer`."""
        os.environ.update(environment)
        emit = emitter(reports.collector, reports.stamp)

        def work() -> Any:
            runtime_env.require_same_code()
            runtime_env.require_store(reports.logs.partition(f"/{ATTEMPTS}/")[0])
            with Heartbeat(reports.collector, heartbeat, on_stop=terminate_self):
                return function(job, process=process, emit=emit)

        log = storage.join(reports.logs, f"process-{process.index:03d}.txt")
        show = None if process.index else emit
        with capture(log, redirect=True, packages=reports.packages, show=show):
            status, value = _answer(work)
            if status not in ("done", Preempted.__name__):
                logger.error("%s", value)
            return status, value


# Typed as Any: ray.remote adds `.remote` and `.options`, which its annotations lack.
_GangActor: Any = ray.remote(max_restarts=0)(_GangProcess)


def run_gang(
    hardware: Hardware,
    function: Callable[..., Any],
    job: Any,
    emit: Emit,
    reports: Reports,
    heartbeat: Heartbeat,
    wait: float | None = None,
) -> Any:
    """Run `function(job, process=..., emit=...)` on the hardware; process 0's result.

    `emit` and `heartbeat` are the step's own, for a gang that is this process.
    """
    if heartbeat.stopping:
        raise Cancelled("stopped before its processes were started")
    accelerators = _accelerators() if hardware.kind == "local" else {}
    if hardware.kind == "local" and not accelerators:
        heartbeat.on_stop = terminate_self
        try:
            if heartbeat.stopping:  # cancelled since the check above, before `on_stop` was set
                raise Cancelled("stopped before training began")
            return InlineWorkers().gang(hardware, function, job, emit)
        finally:
            heartbeat.on_stop = None
    waiting = HardwareWait(hardware, heartbeat, emit, wait)
    with placed(hardware, accelerators, waiting) as place:
        gang, count = f"{heartbeat.name}/gang-{uuid.uuid4().hex[:12]}", hardware.processes
        heartbeats = [f"{gang}/{index}" for index in range(count)]
        actors = [place(_GangActor, index, reports.environment) for index in range(count)]
        try:
            started, address = time.time(), _address(actors[0], hardware) if count > 1 else None
            sent = ray.put(job)
            answers = [
                actor.run.remote(
                    function,
                    sent,
                    GangProcess(index, count, address, started),
                    reports,
                    heartbeats[index],
                    _between_slices(hardware, index, address),
                )
                for index, actor in enumerate(actors)
            ]
            return _collect(answers, heartbeats, hardware, reports.collector, actors)
        finally:
            reports.collector.send("forget", gang)
            for actor in actors:
                ray.kill(actor)


def _address(first: Any, hardware: Hardware) -> str:
    try:
        return ray.get(first.coordinator.remote(), timeout=_BEGIN_SECONDS)
    except RayError as error:
        kind = Preempted if host_lost(error) else WorkerLost
        what = f"{_name(0, hardware)} was lost before it began"
        raise kind(f"{what} ({text_of(error, 200)})") from error


def _between_slices(hardware: Hardware, index: int, address: str | None) -> dict[str, str]:
    """Environment variables by which libtpu joins several slices; it reads them when it starts."""
    if hardware.slices == 1:
        return {}
    from ray.util.tpu import get_tpu_coordinator_env_vars

    host, number = (address or "").rpartition(":")[0], index // hardware.hosts_per_slice
    return get_tpu_coordinator_env_vars(host, hardware.slices, number)


def _accelerators() -> dict[str, float]:
    """GPUs and TPU chips of this node; Ray hides them from processes that do not request them."""
    node = ray.get_runtime_context().get_node_id()
    mine = [n["Resources"] for n in ray.nodes() if n["NodeID"] == node]
    return {k: v for k, v in (mine[0] if mine else {}).items() if k in ("GPU", "TPU") and v > 0}


def _collect(
    answers: list[Any],
    heartbeats: list[str],
    hardware: Hardware,
    collector: Channel,
    actors: list[Any],
) -> Any:
    """Wait for all processes; the first failure or unresponsive process ends the wait.

    An unexpected error may be a consequence of the loss of another process, as a broken connection
    is detected before a lost host is: so it is raised only once every other process has returned or
    has sent a heartbeat since. A loss found before that is raised instead, as it can be retried.
    """
    pending, watch = list(answers), FailureDetector()
    waited_for = dict.fromkeys(heartbeats, time.monotonic())
    first: _Failure | None = None
    while pending:
        look = _LOOK_AGAIN_SECONDS if first else _LOOK_SECONDS
        ready, pending = ray.wait(pending, num_returns=1, timeout=look)
        # Nobody has returned: is one unresponsive, and may an error be raised that came before?
        if not ready:
            asked = time.monotonic()
            body = heartbeats[0].partition("/")[0]
            if (ages := collector.ask("ages", body, seconds=watch.seconds)) is None:
                continue
            if lost := watch.lost(ages, waited_for):
                indices = ", ".join(sorted(name.rpartition("/")[2] for name in lost))
                what = f"{_name(indices, hardware)} stopped responding"
                if _hosts_lost([actors[heartbeats.index(name)] for name in lost], False):
                    raise Preempted(f"{what}: a host was lost")
                raise _lost(what, first)
            if first and first.stands(ages, waited_for, asked, watch.seconds):
                break
            continue
        # One has returned, or Ray says that it is lost.
        index = answers.index(ready[0])
        waited_for.pop(heartbeats[index])
        try:
            status, value = ray.get(ready[0])
        except RayError as error:
            unclear = isinstance(error, ActorUnavailableError)
            if _hosts_lost([actors[index]], True) if unclear else host_lost(error):
                cause = f"the host of {_name(index, hardware)} was lost ({text_of(error, 200)})"
                raise Preempted(cause) from error
            raise _lost(f"{_name(index, hardware)} died ({text_of(error, 200)})", first) from error
        if status == "error":
            line = value.rstrip().rpartition("\n")[2]  # the full traceback is in the process's log
            first = first or _Failure(f"{_name(index, hardware)}: {line}", time.monotonic())
        elif status in _KINDS:
            raise _KINDS[status](value)
        elif status == "OSError":
            raise StoreUnavailable(f"{_name(index, hardware)}: {value}")
        elif status != "done":
            raise PonenteError(f"{_name(index, hardware)}: {value}")
    if first:
        raise PonenteError(first.cause)
    return ray.get(answers[0])[1]


def _hosts_lost(actors: list[Any], unless_told: bool) -> bool:
    """Whether Ray says so of one of these processes, which do not answer; it may take a while."""
    asked = [actor.coordinator.remote() for actor in actors]
    for reference in ray.wait(asked, num_returns=1, timeout=_FATE_SECONDS)[0]:
        try:
            ray.get(reference)
        except RayError as error:
            return host_lost(error)
    return unless_told


@dataclasses.dataclass(frozen=True)
class _Failure:
    """An unexpected error of one process, and when it arrived on the monotonic clock."""

    cause: str
    since: float

    def stands(
        self, ages: HeartbeatAges, waited_for: Iterable[str], asked: float, limit: float
    ) -> bool:
        """Whether the loss of another process can be ruled out as its cause."""
        passed = asked - self.since
        # By now a loss would have been detected. A process that has not begun sends no heartbeats.
        if passed > limit + _LOOK_SECONDS:
            return True
        # A heartbeat that arrived more than `_LATE_SECONDS` after the error was sent after it.
        return all(ages.workers.get(name, passed) < passed - _LATE_SECONDS for name in waited_for)


def _lost(what: str, first: _Failure | None) -> WorkerLost:
    return WorkerLost(f"{what}; another failed first: {first.cause[:250]}" if first else what)


def _name(index: int | str, hardware: Hardware) -> str:
    return f"process {index} of {hardware.processes} on {hardware.name}"
