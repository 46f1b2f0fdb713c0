"""Backends execute requests: the one of this process, and which runs are small enough for it."""

from __future__ import annotations

import abc
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pipeline.errors import Cancelled, InputError
from pipeline.events import Emit, Event
from pipeline.execute.attempt import execute
from pipeline.execute.event_log import EventLog
from pipeline.execute.request import Ending, Outcome, Request
from pipeline.graph.hardware import Hardware
from pipeline.graph.step import Node
from pipeline.graph.step_context import GangProcess, ShardTask, write_shard
from pipeline.plan.listings import Listings, external_values
from pipeline.store.shards import Shard


class Backend(abc.ABC):
    """Executes requests, at most `slots` at once."""

    slots = 1

    @abc.abstractmethod
    def submit(self, request: Request) -> None: ...

    @abc.abstractmethod
    def poll(self) -> list[tuple[Request, Outcome]]:
        """What has ended since the last call, or ends briefly later."""

    def events(self) -> list[Event]:
        return []

    # What a back end need not have.
    def end(self, key: str) -> None:  # noqa: B027
        """Start no shards of the request any more; those in flight are finished."""

    def stop(self) -> None: ...  # noqa: B027

    def close(self) -> None: ...  # noqa: B027


class InlineWorkers:
    """Writes shards one after another and runs a gang of one, in this process."""

    def __init__(self) -> None:
        self.stopping = False
        self._ends: Callable[[], None] | None = None

    def stop(self) -> None:
        """Cancel after the shard in flight; called by a signal handler or by another thread."""
        self.stopping = True
        if self._ends is not None:
            self._ends()

    def map(self, tasks: list[ShardTask], emit: Emit) -> Iterator[Shard]:
        del emit
        for number, task in enumerate(tasks):
            if self.stopping:
                raise Cancelled(f"{len(tasks) - number} shards are not finished")
            yield write_shard(task)

    def gang(
        self, hardware: Hardware, function: Callable[..., Any], job: Any, emit: Emit, logs: str = ""
    ) -> Any:
        """Call the function. Raises `InputError` for hardware other than this process."""
        del logs  # this process already has a log
        if hardware.kind != "local":
            raise InputError(
                f"hardware {hardware.name!r} needs {hardware.processes} processes of its own; "
                "the in-process executor has none: use --executor ray"
            )
        before = signal.getsignal(signal.SIGTERM)

        def ends() -> None:
            deaf, main = signal.getsignal(signal.SIGTERM) == before, threading.main_thread()
            if deaf and threading.current_thread() is main:
                raise KeyboardInterrupt
            # To a training loop, which saves a checkpoint and ends; or here again, in that thread.
            assert main.ident is not None
            signal.pthread_kill(main.ident, signal.SIGINT if deaf else signal.SIGTERM)

        self._ends = ends
        try:
            return function(job, process=GangProcess(), emit=emit)
        finally:
            self._ends = None


class InlineBackend(Backend):
    """Executes each request at once, in this process."""

    def __init__(self, log: EventLog, on_preemption: Callable[[], None] | None = None) -> None:
        self._log = log
        self._on_preemption = on_preemption
        self._workers = InlineWorkers()
        self._finished: list[tuple[Request, Outcome]] = []

    def submit(self, request: Request) -> None:
        outcome = execute(request, self._log.emit, self._workers, redirect=False)
        preempted = outcome.ending is Ending.PREEMPTED and not self._workers.stopping
        if preempted and self._on_preemption is not None:
            self._on_preemption()
        self._finished.append((request, outcome))

    def poll(self) -> list[tuple[Request, Outcome]]:
        finished, self._finished = self._finished, []
        return finished

    def stop(self) -> None:
        self._workers.stop()


_SOURCE_BYTES = 64 * 2**20  # one core tokenises them in about ten seconds


def why_small(order: Iterable[Node], needed: Iterable[Node], listings: Listings) -> str:
    """Why the needed steps can run in this process, for display; empty if they need Ray.

    Such a run ends in less time than Ray needs to start. The work of a fan-out grows with the
    sources of the graph, so those must be known and small, where its steps read any.
    """
    for node in needed:
        wants = node.step.resources
        elsewhere = any(place.kind != "local" for place in node.hardware)
        if node.live or wants.custom or wants.memory or elsewhere:
            return ""
    order, sources = list(order), {}
    for node in order:
        found = listings.of(node)
        if found.keys() != external_values(node).keys():
            return ""
        sources |= {listing.where: listing.most_bytes for listing in found.values()}
    sizes = [size for size in sources.values() if size is not None]
    reads = any(node.step.signature.externals for node in order)
    if (reads and not sizes) or len(sizes) < len(sources) or sum(sizes) > _SOURCE_BYTES:
        return ""
    most = f"sources of at most {max(1, round(sum(sizes) / 1e6))} MB" if sizes else "no sources"
    return f"{most}, local hardware"


def refuse_several_hosts(needed: Iterable[Node]) -> None:
    """Raise `InputError` for hardware of several hosts, which need a cluster."""
    for node in needed:
        for place in node.hardware:
            if place.kind in ("tpu", "gpu") and place.processes > 1:
                raise InputError(
                    f"{node.label}: hardware {place.name!r} has {place.processes} hosts, and this "
                    "run has joined no Ray cluster: start it on one with --cluster auto, or choose "
                    "hardware of one host"
                )
