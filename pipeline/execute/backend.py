"""Backends execute requests: the protocol, and the one of this process, for tests, small graphs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pipeline.errors import Cancelled, InputError
from pipeline.events import Emit, Event
from pipeline.execute.attempt import execute
from pipeline.execute.event_log import EventLog
from pipeline.execute.request import Ending, Outcome, Request
from pipeline.graph.hardware import Hardware
from pipeline.graph.step_context import GangProcess, ShardTask, write_shard
from pipeline.store.shards import Shard


class Backend(Protocol):
    """Executes requests."""

    slots: int

    def submit(self, request: Request) -> None: ...

    def poll(self) -> list[tuple[Request, Outcome]]:
        """Outcomes since the last call; waits briefly when there are none."""
        ...

    def events(self) -> list[Event]: ...

    def end(self, key: str) -> None:
        """Cancel the request of this key; shards in flight are finished."""
        ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


class InlineWorkers:
    """Writes shards one after another and runs a gang of one, in this process."""

    def __init__(self) -> None:
        self.stopping = False
        self._ends: Callable[[], None] | None = None

    def stop(self) -> None:
        """Cancel after the shard in flight; called by a signal handler, at any point of the code,
        or by another thread.
        """
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


class InlineBackend:
    """Executes each request at once, in this process."""

    slots = 1

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

    def events(self) -> list[Event]:
        return []

    def end(self, key: str) -> None: ...

    def stop(self) -> None:
        self._workers.stop()

    def close(self) -> None: ...
