"""The driver's loop: which step runs when, what happens to a failure.

A step starts when its inputs are published. Whoever executes it follows `attempt.py`; this loop
only places requests, counts tries, and reads events. Retries are ours alone: a step whose worker
died or whose storage failed is tried again as a new attempt; a refused input is not.
"""

from __future__ import annotations

from typing import Any, Protocol

from pipeline import manifest, storage
from pipeline.attempt import Outcome, Request, execute
from pipeline.errors import StepFailed
from pipeline.events import EventLog
from pipeline.inline import InlineWorkers
from pipeline.manifest import Manifest
from pipeline.plan import needed_keys
from pipeline.step import Node, topological

TRIES = 3


class Backend(Protocol):
    """Where requests are executed."""

    def submit(self, request: Request) -> None:
        """Begin executing a request."""
        ...

    def poll(self) -> list[tuple[Request, Outcome]]:
        """Outcomes since the last call; waits a moment when there are none."""
        ...

    def events(self) -> list[dict[str, Any]]:
        """Events of the workers since the last call."""
        ...

    def close(self) -> None:
        """Let go of whatever was started; running steps are ended."""
        ...


class InlineBackend:
    """Executes each request at once, in this process."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._finished: list[tuple[Request, Outcome]] = []

    def submit(self, request: Request) -> None:
        """Execute the request."""
        self._finished.append(
            (request, execute(request, self._log.emit, InlineWorkers(), redirect=False))
        )

    def poll(self) -> list[tuple[Request, Outcome]]:
        """What was executed since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def events(self) -> list[dict[str, Any]]:
        """Nothing: events went straight to the log."""
        return []

    def close(self) -> None:
        """Nothing to let go of."""


class Execution:
    """Brings targets up to date in one store.

    Args:
        targets: the nodes whose outputs are wanted.
        prefix: the store.
        log: where events go.
        retry_command: what to print so that a user can go on after a failure.
    """

    def __init__(self, targets: list[Node], prefix: str, log: EventLog, retry_command: str) -> None:
        self._targets = targets
        self._prefix = prefix
        self._log = log
        self._retry_command = retry_command
        self._order = topological(targets)
        self.published: dict[str, Manifest] = {}
        self.executed: list[Node] = []

    def path(self, node: Node) -> str:
        """The node's directory in the store."""
        return storage.join(self._prefix, node.directory)

    def look(self) -> list[Node]:
        """Read the store; returns the nodes that must run, inputs first.

        Raises:
            DamagedOutput: when a needed output is there but is not what was recorded.
        """
        for node in self._order:
            if node.key not in self.published:
                found = manifest.load_verified(self.path(node), node.key)
                if found is not None:
                    self.published[node.key] = found
                    self._tell("hit", node, seconds=found.seconds)
        needed = needed_keys(self._targets, set(self.published))
        return [node for node in self._order if node.key in needed]

    def run(self, backend: Backend, needed: list[Node]) -> None:
        """Execute the needed nodes.

        Raises:
            StepFailed: after everything already running has ended, naming the first failure.
        """
        waiting = {node.key: node for node in needed}
        running: dict[str, Node] = {}
        tries: dict[str, int] = {}
        failure: StepFailed | None = None
        for node in needed:
            self._tell("queued", node)
        while running or (waiting and failure is None):
            if failure is None:
                for node in [n for n in waiting.values() if self._ready(n)]:
                    running[node.key] = waiting.pop(node.key)
                    backend.submit(self._request(node))
            for request, outcome in backend.poll():
                node = running.pop(request.key)
                tries[node.key] = tries.get(node.key, 0) + 1
                self._drain(backend)
                if outcome.status != "failed":
                    self._finish(node, outcome)
                elif outcome.transient and tries[node.key] < TRIES and failure is None:
                    self._tell("retried", node, cause=outcome.cause, tries=tries[node.key])
                    waiting[node.key] = node
                else:
                    failure = failure or self._fail(node, outcome)
            self._drain(backend)
        if failure is not None:
            raise failure

    def _ready(self, node: Node) -> bool:
        return all(child.key in self.published for child in node.inputs.values())

    def _request(self, node: Node) -> Request:
        return Request(
            step=node.step,
            label=node.label,
            key=node.key,
            root=self.path(node),
            inputs={name: (self.path(n), n.key) for name, n in node.inputs.items()},
            arguments={**node.config, **node.runtime},
            canonical_config=node.canonical_config,
        )

    def _finish(self, node: Node, outcome: Outcome) -> None:
        found = manifest.load_verified(self.path(node), node.key)
        if found is None:
            raise StepFailed(
                f"{node.label}: its worker said published, but {self.path(node)} has no manifest"
            )
        self.published[node.key] = found
        self.executed.append(node)
        self._tell(
            "finished", node, seconds=outcome.seconds, status=outcome.status, result=found.result
        )

    def _fail(self, node: Node, outcome: Outcome) -> StepFailed:
        self._tell("failed", node, cause=outcome.cause, log=outcome.log)
        lines = [f"step {node.label} failed: {outcome.cause}"]
        if outcome.log:
            lines.append(f"  log:   {outcome.log}")
        lines.append(f"  retry: {self._retry_command}")
        return StepFailed("\n".join(lines))

    def _drain(self, backend: Backend) -> None:
        for event in backend.events():
            self._log.emit(event)

    def _tell(self, kind: str, node: Node, **details: Any) -> None:
        self._log.emit({"event": kind, "step": node.label, "key": node.key, **details})
