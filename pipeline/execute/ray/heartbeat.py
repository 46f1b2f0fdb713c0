"""Control channel between workers and the driver: events, heartbeats, cancellation.

One actor on the driver's node collects everything. A live worker sends a heartbeat every few
seconds; a waiter gives an unresponsive one up, since Ray notices a process that died
but not, for minutes, a machine that stopped responding. Ages of heartbeats are measured on the
collector's own monotonic clock. An unresponsive machine may also hold tasks that have not begun: so
once one is found, those are submitted again, elsewhere.
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

_SILENCE_SECONDS = 60.0
_BEATS_IN_SILENCE = 12
_QUEUED = 10  # silences that a task may take to begin before it has to queue again


def silence_seconds() -> float:
    """How long a worker may be silent before it is given up: `PONENTE_SILENCE_SECONDS`, or 60.

    The driver hands its own setting to all workers, so that they beat often enough for it.

    Raises:
        InputError: when the setting is not a number of at least one second.
    """
    said = os.environ.get(runtime_env.SILENCE, str(_SILENCE_SECONDS))
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < float("inf"):
        raise InputError(f"{runtime_env.SILENCE}: expected seconds, at least 1, got {said!r}")
    return seconds


@dataclasses.dataclass(frozen=True)
class HeartbeatAges:
    """Seconds of silence by worker; by node, the least of its workers."""

    workers: Mapping[str, float] = dataclasses.field(default_factory=dict)
    nodes: Mapping[str, float] = dataclasses.field(default_factory=dict)


class _Collector:
    """Events and heartbeats of all workers of one run."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._beats: dict[str, tuple[float, str]] = {}
        self._stopped: set[str] = set()

    def emit(self, event: dict[str, Any]) -> None:
        """Keep one event."""
        self._events.append(event)

    def beat(self, name: str, node: str) -> bool:
        """Hear that `name` is alive on `node`; answers whether it is to stop."""
        self._beats[name] = (time.monotonic(), node)
        return not self._stopped.isdisjoint({"", name, name.partition("/")[0]})

    def forget(self, name: str) -> None:
        """Expect no more beats of `name`, nor of workers of its own (`name/...`)."""
        for other in [n for n in self._beats if n == name or n.startswith(f"{name}/")]:
            del self._beats[other]

    def stop(self, body: str = "") -> None:
        """Answer beats from now on with the word to stop: one body's and its workers', or all."""
        self._stopped.add(body)

    def age(self, name: str) -> float:
        """Seconds since the last beat of `name`; 0 if there is nobody to expect one of."""
        return time.monotonic() - self._beats[name][0] if name in self._beats else 0.0

    def silence(self) -> HeartbeatAges:
        """How long everybody who has beaten and was not forgotten has been silent since."""
        now = time.monotonic()
        workers = {name: now - beat for name, (beat, _) in self._beats.items()}
        nodes: dict[str, float] = {}
        for name, (_, node) in self._beats.items():
            nodes[node] = min(workers[name], nodes.get(node, workers[name]))
        return HeartbeatAges(workers, nodes)

    def drain(self) -> tuple[list[dict[str, Any]], HeartbeatAges]:
        """All events since the last call in order of arrival, and `silence`."""
        events, self._events = self._events, []
        return events, self.silence()


# Typed as Any: ray.remote adds `.remote` and `.options`, which its annotations do not say.
_Actor: Any = ray.remote(num_cpus=0, max_restarts=0)(_Collector)


def start_collector() -> Any:
    """A collector on the node of the caller, so that it is there as long as the driver is."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return _Actor.options(scheduling_strategy=here).remote()


def emitter(collector: Any, stamp: Mapping[str, str] | None = None) -> Emit:
    """An emitter that posts to a collector without waiting, stamped with this machine's time.

    Args:
        collector: the driver's.
        stamp: fields every event gets, such as the step it belongs to.
    """

    def emit(event: dict[str, Any]) -> None:
        collector.emit.remote({"time": time.time(), **event, **(stamp or {})})

    return emit


class Heartbeat:
    """Context in which this process beats under a name, and hears when it is to stop.

    Attributes:
        name: under which it beats.
        on_stop: called once, in the beating thread, when the word to stop arrives.
    """

    def __init__(
        self, collector: Any, name: str, on_stop: Callable[[], None] | None = None
    ) -> None:
        self._collector = collector
        self.name = name
        self.on_stop = on_stop
        self._silence = silence_seconds()
        self._node = ray.get_runtime_context().get_node_id()
        self._stopping = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"pulse-{name}", daemon=True)

    @property
    def stopping(self) -> bool:
        """Whether the word to stop has arrived."""
        return self._stopping.is_set()

    def __enter__(self) -> Heartbeat:
        self._once()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._collector.forget.remote(self.name)

    def _beat(self) -> None:
        while not self._done.wait(self._silence / _BEATS_IN_SILENCE):
            self._once()

    def _once(self) -> None:
        try:
            beat = self._collector.beat.remote(self.name, self._node)
            stop = ray.get(beat, timeout=self._silence / 2)
        except RayError:
            # The driver is gone or out of reach: Ray ends us in the first case, and in the second
            # whoever waits for us finds somebody else.
            return
        if stop and not self.stopping:
            self._stopping.set()
            on_stop = self.on_stop  # read once: another thread takes it back
            if on_stop is not None:
                on_stop()


def terminate_self() -> None:
    """What asks a training loop to save and leave."""
    os.kill(os.getpid(), signal.SIGTERM)


_tasks: list[str] = []  # names of this process's tasks: the last one counts


def exit_with_parent(task: str, collector: Any) -> None:
    """End this process should the step's body that `task` (`body/...`) belongs to fall silent.

    Ray keeps an idle worker and its cores for whoever leased them, also for one that went silent.
    """
    _tasks.append(task)
    if len(_tasks) == 1:
        threading.Thread(target=_leave, args=(collector,), name="leave", daemon=True).start()


def _leave(collector: Any) -> None:
    limit = silence_seconds()
    while True:
        time.sleep(limit / _BEATS_IN_SILENCE)
        del _tasks[:-1]
        body = _tasks[-1].partition("/")[0]
        with contextlib.suppress(RayError):
            if ray.get(collector.age.remote(body), timeout=limit) > limit:
                # So that this node is not taken for a silent one.
                ray.get(collector.forget.remote(_tasks[-1]), timeout=limit)
                os._exit(1)


class FailureDetector:
    """What one who waits for tasks makes of silence: which to give up, which nodes to avoid."""

    def __init__(self) -> None:
        self.seconds = silence_seconds()
        self._avoided: frozenset[str] | None = None

    @property
    def elsewhere(self) -> dict[str, str] | None:
        """Ray's label selector for nodes that are not silent."""
        nodes = ",".join(sorted(self._avoided or ()))
        return {"ray.io/node-id": f"!in({nodes})"} if nodes else None

    def lost(self, silence: HeartbeatAges, waited_for: Mapping[str, float]) -> dict[str, bool]:
        """Tasks to give up, and whether they had begun.

        Args:
            silence: what the collector says.
            waited_for: when each was submitted, on this process's monotonic clock.
        """
        # In the end Ray has noticed too, and a node that was wronged gets another chance.
        end = _QUEUED * self.seconds
        silent = frozenset(n for n, s in silence.nodes.items() if self.seconds < s < end)
        found = silent - (silent if self._avoided is None else self._avoided)
        self._avoided = silent
        now, lost = time.monotonic(), {}
        for name, since in waited_for.items():
            seconds = silence.workers.get(name)
            if seconds is not None and seconds > self.seconds:
                lost[name] = True
            # The second: a node that fell silent before anything had begun there is never found.
            elif seconds is None and (found or now - since > end):
                lost[name] = False
        return lost
