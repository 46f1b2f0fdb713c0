"""Control channel between workers and the driver: events, heartbeats, cancellation.

One actor on the driver's node, the collector, receives all of them. A live worker sends a heartbeat
every few seconds; its failure detector gives up a worker after a timeout, since Ray detects a dead
process at once, but an unresponsive machine only after minutes. Ages of heartbeats are measured on
the collector's own monotonic clock. An unresponsive machine may also hold tasks that have not
begun: so once one is found, such tasks are submitted again, to other nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.errors import InputError
from pipeline.execute.ray import runtime_env
from pipeline.graph.step_context import Emit

_TIMEOUT_SECONDS = 60.0
_BEATS_IN_TIMEOUT = 12
_QUEUED = 10  # a task that has not begun after so many timeouts is submitted again


def heartbeat_timeout() -> float:
    """Seconds without a heartbeat after which a worker is lost: `PONENTE_HEARTBEAT_TIMEOUT`, or 60.

    The driver passes its own setting to all workers, so that they send heartbeats often enough.

    Raises:
        InputError: when the setting is not a number of at least one second.
    """
    text = os.environ.get(runtime_env.TIMEOUT, str(_TIMEOUT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < float("inf"):
        raise InputError(f"{runtime_env.TIMEOUT}: expected seconds, at least 1, got {text!r}")
    return seconds


@dataclasses.dataclass(frozen=True)
class HeartbeatAges:
    """Seconds since the last heartbeat, by worker; by node, the minimum over its workers."""

    workers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    nodes: Mapping[str, float] = dataclasses.field(default_factory=dict)


class _Collector:
    """Events and heartbeats of all workers of one run."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._beats: dict[str, tuple[float, str]] = {}
        self._stopped: set[str] = set()

    def emit(self, event: dict[str, Any]) -> None:
        """Append one event."""
        self._events.append(event)

    def beat(self, name: str, node: str) -> bool:
        """Record a heartbeat of `name` on `node`; returns whether the sender is cancelled."""
        self._beats[name] = (time.monotonic(), node)
        # The first part of a name is the step's body, the empty one stands for all.
        return not self._stopped.isdisjoint({"", name, name.partition("/")[0]})

    def forget(self, name: str) -> None:
        """Expect no more heartbeats of `name`, nor of its workers (`name/...`)."""
        for other in [n for n in self._beats if n == name or n.startswith(f"{name}/")]:
            del self._beats[other]

    def stop(self, body: str = "") -> None:
        """Cancel one body and its workers, or all: their next heartbeat returns True."""
        self._stopped.add(body)

    def age(self, name: str) -> float:
        """Seconds since the last heartbeat of `name`; 0 if none is expected."""
        return time.monotonic() - self._beats[name][0] if name in self._beats else 0.0

    def ages(self) -> HeartbeatAges:
        """Ages of all workers that have sent a heartbeat and were not forgotten."""
        now = time.monotonic()
        workers = {name: now - beat for name, (beat, _) in self._beats.items()}
        nodes: dict[str, float] = {}
        for name, (_, node) in self._beats.items():
            nodes[node] = min(workers[name], nodes.get(node, workers[name]))
        return HeartbeatAges(workers, nodes)

    def drain(self) -> tuple[list[dict[str, Any]], HeartbeatAges]:
        """All events since the last call in order of arrival, and `ages`."""
        events, self._events = self._events, []
        return events, self.ages()


# Typed as Any: ray.remote adds `.remote` and `.options`, which its annotations lack.
_Actor: Any = ray.remote(num_cpus=0, max_restarts=0)(_Collector)


def start_collector() -> Any:
    """A collector on the caller's node, so that it lives as long as the driver's machine."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return _Actor.options(scheduling_strategy=here).remote()


def emitter(collector: Any, stamp: Mapping[str, str] | None = None) -> Emit:
    """An emitter that sends events to a collector without waiting, with this machine's time.

    Args:
        collector: the driver's collector.
        stamp: fields added to every event, such as the step's label.
    """

    def emit(event: dict[str, Any]) -> None:
        collector.emit.remote({"time": time.time(), **event, **(stamp or {})})

    return emit


class Heartbeat:
    """Context in which this process sends heartbeats and receives a cancellation in the answers.

    Attributes:
        name: the name of its heartbeats.
        on_stop: called once, in the heartbeat's thread, on a cancellation.
    """

    def __init__(
        self, collector: Any, name: str, on_stop: Callable[[], None] | None = None
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
        """Whether the step was cancelled."""
        return self._stopping.is_set()

    def __enter__(self) -> Heartbeat:
        self._once()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._collector.forget.remote(self.name)

    def _beat(self) -> None:
        while not self._done.wait(self._timeout / _BEATS_IN_TIMEOUT):
            self._once()

    def _once(self) -> None:
        try:
            beat = self._collector.beat.remote(self.name, self._node)
            stop = ray.get(beat, timeout=self._timeout / 2)
        except RayError:
            # The driver is dead or unreachable. Ray ends this process in the first case; the driver
            # runs the step on another node in the second.
            return
        if stop and not self.stopping:
            self._stopping.set()
            on_stop = self.on_stop  # read once: another thread may set it to None
            if on_stop is not None:
                on_stop()


def terminate_self() -> None:
    """Ask this process's training loop to save and end."""
    os.kill(os.getpid(), signal.SIGTERM)


_tasks: list[str] = []  # names of this process's tasks; the last one is running


def exit_with_parent(task: str, collector: Any) -> None:
    """End this process once the step's body of `task` (`body/...`) is unresponsive.

    Ray keeps an idle worker and its cores reserved for the process that leased them, even if that
    process is unresponsive.
    """
    _tasks.append(task)
    if len(_tasks) == 1:
        threading.Thread(target=_watch, args=(collector,), name="watch", daemon=True).start()


def _watch(collector: Any) -> None:
    limit = heartbeat_timeout()
    while True:
        time.sleep(limit / _BEATS_IN_TIMEOUT)
        del _tasks[:-1]
        body = _tasks[-1].partition("/")[0]
        with contextlib.suppress(RayError):
            if ray.get(collector.age.remote(body), timeout=limit) > limit:
                # So that the failure detector does not count this node as unresponsive.
                ray.get(collector.forget.remote(_tasks[-1]), timeout=limit)
                os._exit(1)


class FailureDetector:
    """Derives from the ages of heartbeats which tasks are lost and which nodes to avoid."""

    def __init__(self) -> None:
        self.seconds = heartbeat_timeout()
        self._avoided: frozenset[str] | None = None

    @property
    def responsive_nodes(self) -> dict[str, str] | None:
        """Ray's label selector for the nodes that respond; None for all nodes."""
        nodes = ",".join(sorted(self._avoided or ()))
        return {"ray.io/node-id": f"!in({nodes})"} if nodes else None

    def lost(self, ages: HeartbeatAges, waited_for: Mapping[str, float]) -> dict[str, bool]:
        """Names of lost tasks -> whether they had begun.

        Args:
            ages: ages of heartbeats from the collector.
            waited_for: when each task was submitted, on this process's monotonic clock.
        """
        # Nodes are avoided until `end`: by then Ray has removed a dead one itself, and one that was
        # only slow may be used again.
        end = _QUEUED * self.seconds
        unresponsive = frozenset(n for n, s in ages.nodes.items() if self.seconds < s < end)
        found = unresponsive - (unresponsive if self._avoided is None else self._avoided)
        self._avoided = unresponsive
        now, lost = time.monotonic(), {}
        for name, since in waited_for.items():
            seconds = ages.workers.get(name)
            if seconds is not None and seconds > self.seconds:
                lost[name] = True
            # Not begun: submit it again if a node just became unresponsive, which may hold it, or
            # after `end`, as a node that failed before its first heartbeat is in no list.
            elif seconds is None and (found or now - since > end):
                lost[name] = False
        return lost
