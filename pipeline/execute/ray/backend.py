"""Executes requests as Ray tasks. Ray is started, or joined, when the first step has to run."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import sys
import time
import uuid
from typing import Any

import ray
from ray.exceptions import RayError

from pipeline.errors import InputError, PonenteError, text_of
from pipeline.events import Event
from pipeline.execute.attempt import execute
from pipeline.execute.backend import Backend
from pipeline.execute.ray import runtime_env
from pipeline.execute.ray.heartbeat import (
    Channel,
    FailureDetector,
    Heartbeat,
    HeartbeatAges,
    emitter,
    ended,
    host_lost,
)
from pipeline.execute.ray.workers import RayWorkers
from pipeline.execute.request import Ending, Outcome, Request
from pipeline.graph.hardware import Hardware
from pipeline.graph.module_names import hiding, outside
from pipeline.store import retry

_POLL_SECONDS = 0.2
_CALL_SECONDS = 2.0
_FOLLOWER_SECONDS = 120.0  # that a step which follows another may wait for hardware
_STARTS = 3
_START_PAUSE_SECONDS = 5.0
_OBJECT_STORE_BYTES = 256 * 2**20
# A Ray started by this process has one unit of this resource. Steps on "local" hardware, which use
# all of the machine's devices, request it, so that only one of them runs at a time.
_WHOLE_MACHINE = {"ponente_machine": 1.0}
_UNPICKLABLE = (TypeError, ValueError, AttributeError, RecursionError, pickle.PicklingError)

logger = logging.getLogger("ponente")


@dataclasses.dataclass(frozen=True)
class _Running:
    request: Request
    heartbeat: str
    since: float


def _start(address: str | None) -> None:
    """Start or join Ray, with retries: on a busy machine Ray may miss its own start-up deadline."""
    for left in reversed(range(_STARTS)):
        try:
            _start_once(address)
            return
        except PonenteError:
            raise
        except Exception as error:
            ray.shutdown()
            cause = text_of(error)
            if not left:
                raise InputError(
                    f"Ray does not start on this machine ({cause}); end other programs, free "
                    "memory and /tmp, or use --executor inline"
                ) from error
            logger.warning("Ray did not start (%s); starting it again", cause)
            time.sleep(_START_PAUSE_SECONDS)


def _start_once(address: str | None) -> None:
    # `outside` may name modules whose import failed, which are not in `sys.modules`.
    for name in outside & sys.modules.keys():
        ray.cloudpickle.register_pickle_by_value(sys.modules[name])
    for name, value in runtime_env.STARTING.items():
        os.environ.setdefault(name, value)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        # Workers of a local Ray import from these folders before all others.
        folders = os.path.dirname(os.path.realpath(sys.argv[0])), os.getcwd()
        if other := hiding("pipeline", folders):
            raise InputError(
                f"{other} hides ponente's package 'pipeline' from Ray's workers; rename it, or use "
                "--executor inline"
            )
        # Without "local", Ray joins any cluster that is still running on this machine.
        ray.init(
            "local",
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            resources=_WHOLE_MACHINE,
            **quiet,
        )
        return
    try:
        ray.init(address, runtime_env=runtime_env.runtime_environment(), **quiet)
    except ConnectionError as error:
        raise InputError(f"no Ray cluster answers at {address!r}: {error}") from error


def _execute(request: Request, collector: Channel, heartbeat: str, wait: float | None) -> Outcome:
    try:
        runtime_env.require_same_code()
        runtime_env.require_store(request.ledger.directory)
    except PonenteError as error:
        return Outcome(Ending.FAILED, cause=str(error))
    with runtime_env.handed(request.environment), Heartbeat(collector, heartbeat) as beating:
        if beating.stopping:
            return Outcome(Ending.STOPPED, cause="not begun")
        if request.follows:  # it must not block its live input
            wait = _FOLLOWER_SECONDS if wait is None else min(wait, _FOLLOWER_SECONDS)
        workers = RayWorkers(collector, request, beating, wait)
        emit = emitter(collector, {"step": request.label, "key": request.key})
        with retry.scope(lambda: beating.stopping, emit):
            return execute(request, emit, workers)


# Typed as Any: ray.remote adds `.remote` and `.options`, which its annotations lack.
_run_step: Any = ray.remote(max_retries=0)(_execute)


class RayBackend(Backend):
    """Executes requests as tasks of a local Ray, or of the cluster at `address`.

    A gang may wait for its hardware for `wait` seconds; None for no limit.
    """

    slots = 10_000  # no limit: the requested resources decide how many steps run at once

    def __init__(self, address: str | None = None, wait: float | None = None) -> None:
        _start(address)
        self._own, self._wait = address is None, wait
        self._watch = FailureDetector()
        self._collector = Channel(f"ponente-{uuid.uuid4().hex}")
        self._collector.make()
        self._running: dict[Any, _Running] = {}
        self._refused: list[tuple[Request, Outcome]] = []
        self._stopped: set[str] = set()
        self._ages: HeartbeatAges | None = None  # of heartbeats, when they are new
        self._drain: Any = None

    def submit(self, request: Request) -> None:
        heartbeat = f"{request.step.name}-{uuid.uuid4().hex}"  # without a slash
        wants = request.step.resources
        task = _run_step.options(
            num_cpus=wants.cpus,
            memory=wants.memory or None,
            resources={**wants.custom, **self._machine(request)} or None,
            name=request.label,
            label_selector=self._watch.responsive_nodes,
        )
        try:
            reference = task.remote(request, self._collector, heartbeat, self._wait)
        except _UNPICKLABLE as error:
            cause = f"{self._unpicklable(request)} cannot be sent to a worker: {text_of(error)}"
            self._refused.append((request, Outcome(Ending.FAILED, cause=cause)))
            return
        self._running[reference] = _Running(request, heartbeat, time.monotonic())

    def _unpicklable(self, request: Request) -> str:
        fields = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
        fields |= {f"argument {name!r}": value for name, value in fields.pop("arguments").items()}
        for name, value in fields.items():
            try:
                ray.cloudpickle.dumps(value)
            except _UNPICKLABLE:
                return name
        return "its request"

    def _machine(self, request: Request) -> dict[str, float]:
        """`_WHOLE_MACHINE` for a step on "local" hardware, except a follower: it shares it."""
        places = [v for v in request.arguments.values() if isinstance(v, Hardware)]
        alone = self._own and not request.follows and any(p.kind == "local" for p in places)
        return _WHOLE_MACHINE if alone else {}

    def poll(self) -> list[tuple[Request, Outcome]]:
        found, self._refused = self._refused, []
        if not self._running:
            return found
        ready = ended(list(self._running), 0 if found else _POLL_SECONDS)
        found += [self._outcome(r, self._running.pop(r)) for r in ready]
        ages, self._ages = self._ages, None
        if ages is None:
            return found
        lost = self._watch.lost(ages, {r.heartbeat: r.since for r in self._running.values()})
        for reference, r in list(self._running.items()):
            if r.heartbeat in lost:
                del self._running[reference]
                ray.cancel(reference, force=True)
                if lost[r.heartbeat]:
                    cause = f"its worker did not respond for {self._watch.seconds:.0f} s"
                    found.append((r.request, Outcome(Ending.LOST, cause=cause)))
                else:
                    self._collector.send("forget", r.heartbeat)
                    self.submit(r.request)
        return found

    def _outcome(self, reference: Any, running: _Running) -> tuple[Request, Outcome]:
        try:
            return running.request, ray.get(reference)
        except RayError as error:
            self._collector.send("forget", running.heartbeat)
            gone = host_lost(error)
            cause = f"its {'host was lost' if gone else 'worker died'} ({text_of(error)})"
            return running.request, Outcome(Ending.PREEMPTED if gone else Ending.LOST, 0.0, cause)

    def events(self) -> list[Event]:
        pending = self._drain or self._collector.send("drain", tuple(self._stopped))
        # A late call is kept and waited for again: its events are gone from the collector.
        self._drain = pending
        if not ray.wait([pending], timeout=_CALL_SECONDS)[0]:
            return []
        self._drain = None
        try:
            events, self._ages = ray.get(pending)
        except RayError as error:
            logger.info("the collector of events is made again (%s)", type(error).__name__)
            self._collector.make()
            return []
        return events

    def end(self, key: str) -> None:
        self._stopped |= {r.heartbeat for r in self._running.values() if r.request.key == key}

    def stop(self) -> None:
        """Cancel all workers at their next heartbeat; shards in flight finish.

        A task that has not begun, which may wait for resources for ever, is cancelled at once.
        """
        self._stopped.add("")
        for reference, running in self._running.items():
            if not self._watch.has_begun(running.heartbeat):
                ray.cancel(reference)

    def close(self) -> None:
        ray.shutdown()
