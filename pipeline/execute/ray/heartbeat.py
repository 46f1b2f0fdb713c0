"""Control channel between workers and the driver: events, heartbeats, cancellation.

One actor on the driver's node, the collector, receives all of them; if its process dies, the driver
makes another one of the same name, which the workers find. A failure detector gives up a worker
after a timeout, since Ray detects an unresponsive machine only after minutes. Ages are by the
collector's monotonic clock. An unresponsive machine may also hold tasks that have not begun: they
are submitted again, to other nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    RayActorError,
    RayError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.events import Emit, Event
from pipeline.execute.ray import runtime_env
from pipeline.store import retry

_TIMEOUT_SECONDS = 60.0
_BEATS_IN_TIMEOUT = 12
_MOST_EVENTS = 100_000  # that wait for the driver; the oldest are dropped
_QUEUED = 10  # a task that has not begun after so many timeouts is submitted again


def heartbeat_timeout() -> float:
    """Seconds without a heartbeat after which a worker is lost.

    `PONENTE_HEARTBEAT_TIMEOUT` or 60; the driver passes its own setting to all workers.
    """
    return retry.seconds_of(runtime_env.TIMEOUT, _TIMEOUT_SECONDS, least=1.0)


@dataclasses.dataclass(frozen=True)
class HeartbeatAges:
    """Seconds since the last heartbeat, by worker; by node, the minimum over its workers."""

    workers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    nodes: Mapping[str, float] = dataclasses.field(default_factory=dict)


class _Collector:
    """Events and heartbeats of all workers of one run.

    A name is that of a step's body, or begins with it and a slash.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self._beats: dict[str, tuple[float, str]] = {}  # by name: when, and on which node
        self._stopped: frozenset[str] = frozenset()

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def beat(self, name: str, node: str) -> bool:
        """Record a heartbeat of `name` on `node`; returns whether the sender is cancelled."""
        self._beats[name] = (time.monotonic(), node)
        return not self._stopped.isdisjoint({"", name.partition("/")[0]})

    def forget(self, name: str) -> None:
        """Expect no more heartbeats of `name`, nor of its workers (`name/...`)."""
        for other in [n for n in self._beats if n == name or n.startswith(f"{name}/")]:
            del self._beats[other]

    def age(self, name: str) -> float:
        """Seconds since the last heartbeat of `name`; 0 if none is expected."""
        now = time.monotonic()
        return now - self._beats.get(name, (now, ""))[0]

    def ages(self, body: str) -> HeartbeatAges:
        """Ages of the workers of one body, or of all bodies (""), that were not forgotten."""
        now, workers, nodes = time.monotonic(), {}, dict[str, float]()
        for name, (beat, node) in self._beats.items():
            mine, worker, _ = name.partition("/")
            if mine == body if body else not worker:
                workers[name] = now - beat
            nodes[node] = min(nodes.get(node, now), now - beat)
        return HeartbeatAges(workers, nodes)

    def drain(self, stopped: Collection[str]) -> tuple[list[Event], HeartbeatAges]:
        """All events since the last call in order of arrival, and `ages` of the bodies.

        `stopped` are the bodies that are cancelled, with their workers; "" stands for all.
        """
        self._stopped = frozenset(stopped)
        events, self._events = list(self._events), deque(maxlen=_MOST_EVENTS)
        return events, self.ages("")


# Typed as Any: ray.remote adds `.remote` and `.options`, which its annotations lack.
_Actor: Any = ray.remote(num_cpus=0, max_restarts=0)(_Collector)


class Channel:
    """How the driver and its workers reach the collector of their run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._actor: Any = None

    def make(self) -> None:
        """Make the collector on the caller's node, so that it lives as long as the driver's."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        how = {"name": self._name, "get_if_exists": True, "scheduling_strategy": here}
        with contextlib.suppress(ValueError, RayError):  # Ray has yet to notice that it is gone
            self._actor = _Actor.options(**how).remote()

    def send(self, method: str, *arguments: Any) -> Any:
        return getattr(self._actor, method).remote(*arguments)

    def ask(self, method: str, *arguments: Any, seconds: float) -> Any:
        """The answer of a method; None when there is none in that time."""
        try:
            return ray.get(self.send(method, *arguments), timeout=seconds)
        except RayActorError:
            with contextlib.suppress(ValueError, RayError):
                self._actor = ray.get_actor(self._name)  # the next one, if it was made
        except RayError:
            # The driver is dead or unreachable. Ray ends this process in the first case; the driver
            # runs the step on another node in the second.
            pass
        return None


def emitter(collector: Channel, stamp: Mapping[str, str]) -> Emit:
    """An emitter that sends events without waiting, with this machine's time and the stamp."""

    def emit(event: Event) -> None:
        stamped = msgspec.structs.replace(event, time=event.time or time.time(), **stamp)
        collector.send("emit", stamped)

    return emit


class Heartbeat:
    """Context in which this process sends heartbeats and receives a cancellation in the answers."""

    def __init__(
        self, collector: Channel, name: str, on_stop: Callable[[], None] | None = None
    ) -> None:
        self._collector = collector
        self.name = name
        self.on_stop = on_stop
        self._timeout = heartbeat_timeout()
        self._node = ray.get_runtime_context().get_node_id()
        self._stopping = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat-{name}", daemon=True)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def __enter__(self) -> Heartbeat:
        self._once()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._collector.send("forget", self.name)

    def _beat(self) -> None:
        while not self._done.wait(self._timeout / _BEATS_IN_TIMEOUT):
            self._once()

    def _once(self) -> None:
        stop = self._collector.ask("beat", self.name, self._node, seconds=self._timeout / 2)
        if stop and not self.stopping:
            self._stopping.set()
            on_stop = self.on_stop  # read once: another thread may set it to None
            if on_stop is not None:
                on_stop()


def terminate_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


_tasks: list[str] = []  # names of this process's tasks; the last one is running


def exit_with_parent(task: str, collector: Channel) -> None:
    """End this process once the step's body of `task` (`body/...`) is unresponsive.

    Ray keeps an idle worker and its cores reserved for the process that leased them, even if that
    process is unresponsive.
    """
    _tasks.append(task)
    if len(_tasks) == 1:
        threading.Thread(target=_watch, args=(collector,), name="watch", daemon=True).start()


def _watch(collector: Channel) -> None:
    limit = heartbeat_timeout()
    while True:
        time.sleep(limit / _BEATS_IN_TIMEOUT)
        del _tasks[:-1]
        body = _tasks[-1].partition("/")[0]
        if (collector.ask("age", body, seconds=limit) or 0.0) > limit:
            # So that the failure detector does not count this node as unresponsive.
            collector.ask("forget", _tasks[-1], seconds=limit)
            os._exit(1)


class FailureDetector:
    """Derives from the ages of heartbeats which tasks are lost and which nodes to avoid."""

    def __init__(self) -> None:
        self.seconds = heartbeat_timeout()
        self._avoided: frozenset[str] | None = None
        # Of each task that has begun: since when the collector does not know it; inf if it does.
        self._unknown: dict[str, float] = {}

    @property
    def responsive_nodes(self) -> dict[str, str] | None:
        """Ray's label selector for the nodes that respond; None for all nodes."""
        nodes = ",".join(sorted(self._avoided or ()))
        return {"ray.io/node-id": f"!in({nodes})"} if nodes else None

    def has_begun(self, name: str) -> bool:
        return name in self._unknown

    def lost(self, ages: HeartbeatAges, waited_for: Mapping[str, float]) -> dict[str, bool]:
        """Names of lost tasks -> whether they had begun."""
        # Nodes are avoided until `end`: by then Ray has removed a dead one itself, and one that was
        # only slow may be used again.
        end = _QUEUED * self.seconds
        unresponsive = frozenset(n for n, s in ages.nodes.items() if self.seconds < s < end)
        found = unresponsive - (unresponsive if self._avoided is None else self._avoided)
        self._avoided = unresponsive
        now, lost, unknown = time.monotonic(), {}, {}
        for name, since in waited_for.items():
            seconds = ages.workers.get(name)
            if seconds is not None:
                unknown[name] = float("inf")
            elif name in self._unknown:
                # The collector was made again: a live worker sends it a heartbeat soon.
                unknown[name] = min(self._unknown[name], now)
                seconds = now - unknown[name]
            if seconds is not None and seconds > self.seconds:
                lost[name] = True
            # Not begun: submit it again if a node just became unresponsive, which may hold it, or
            # after `end`, as a node that failed before its first heartbeat is in no list.
            elif seconds is None and (found or now - since > end):
                lost[name] = False
        self._unknown = unknown
        return lost


def host_lost(error: RayError) -> bool:
    """Whether a process was lost with its machine, and not alone, as one that crashes is."""
    if isinstance(error, ActorDiedError):
        return error.preempted or "its node has died" in str(error)
    # Ray learns of a process that dies on a live node from that node.
    return isinstance(error, NodeDiedError | ActorUnavailableError)


def ended(references: list[Any], seconds: float) -> list[Any]:
    """The tasks that have ended; waits for the first one for at most `seconds`."""
    if not ray.wait(references, num_returns=1, timeout=seconds, fetch_local=False)[0]:
        return []
    return ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)[0]
