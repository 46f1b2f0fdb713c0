"""Backends, which execute requests: the protocol, and the backend that is this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pipeline.events import Event
from pipeline.execute.attempt import Ending, Outcome, Request, execute
from pipeline.execute.event_log import EventLog
from pipeline.execute.inline import InlineWorkers


class Backend(Protocol):
    """Executes requests.

    Attributes:
        slots: how many requests it executes at once.
    """

    slots: int

    def submit(self, request: Request) -> None:
        """Begin executing a request."""
        ...

    def poll(self) -> list[tuple[Request, Outcome]]:
        """Outcomes since the last call; waits briefly when there are none."""
        ...

    def events(self) -> list[Event]:
        """Events of the workers since the last call."""
        ...

    def end(self, key: str) -> None:
        """Cancel the request of this key; shards in flight are finished."""
        ...

    def stop(self) -> None:
        """Cancel all running requests; shards in flight are finished."""
        ...

    def close(self) -> None:
        """Release all resources; running steps are ended."""
        ...


class InlineBackend:
    """Executes each request at once, in this process.

    Args:
        log: where events are written.
        on_preemption: called when a step was preempted by a SIGTERM, which concerns the whole run,
            as the step runs in the driver's process.
    """

    slots = 1

    def __init__(self, log: EventLog, on_preemption: Callable[[], None] | None = None) -> None:
        self._log = log
        self._on_preemption = on_preemption
        self._workers = InlineWorkers()
        self._finished: list[tuple[Request, Outcome]] = []

    def submit(self, request: Request) -> None:
        """Execute the request."""
        outcome = execute(request, self._log.emit, self._workers, redirect=False)
        preempted = outcome.ending is Ending.PREEMPTED and not self._workers.stopping
        if preempted and self._on_preemption is not None:
            self._on_preemption()
        self._finished.append((request, outcome))

    def poll(self) -> list[tuple[Request, Outcome]]:
        """What was executed since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def events(self) -> list[Event]:
        """Always empty: events go straight to the log."""
        return []

    def end(self, key: str) -> None:
        """Does nothing: a request has ended when `submit` returns."""

    def stop(self) -> None:
        """Cancel the running request; called by a signal handler, as `submit` blocks."""
        self._workers.stop()

    def close(self) -> None:
        """Does nothing: there are no resources to release."""
