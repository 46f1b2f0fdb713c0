"""The driver's loop: which step runs when, and what happens after a failure.

A step starts when its inputs are published and settled; one that follows a live input (see
`live.py`) starts when that input's step is at work, and is cancelled and queued again if that step
is lost, so it never holds resources that the other one needs. `attempt.py` executes an attempt;
this loop only submits requests, counts tries and reads events. It alone decides about retries, with
back-off: a step whose worker died or whose storage failed is retried as a new attempt, a refused
input is not, and waiting for hardware or a preemption uses no try.

A step is not run when an existing output was made from the same contents: its output refers to that
one. A published step is run again when an input was rebuilt with other content.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from pipeline.errors import Cancelled, StepFailed
from pipeline.execute.attempt import Outcome, Request
from pipeline.execute.backend import Backend
from pipeline.execute.events import EventLog
from pipeline.execute.node_state import NodeState, States, corrupt_outputs, make_request
from pipeline.execute.reference import refer
from pipeline.execute.small import why_small
from pipeline.graph.node import Node, topological
from pipeline.identity import provenance
from pipeline.plan.listings import Listings
from pipeline.plan.plan import source_notes
from pipeline.plan.state import (
    GraphState,
    Selection,
    contents,
    decide,
    look,
    needed_keys,
    pick,
    resolve,
    staleness,
    with_force,
)
from pipeline.store import manifest, retry
from pipeline.store.builds import confirm
from pipeline.store.manifest import SAME_INPUTS
from pipeline.store.outputs import Found, Store

STOP_SECONDS = 30.0
_POLL_SECONDS = 0.2


class Execution:
    """Brings targets up to date in one store.

    Args:
        targets: the nodes whose outputs are wanted.
        store: the store of the outputs.
        log: the event log.
        retry_command: the command that resumes the run, to print after a failure.
        choice: which part of the graph to run, and how.
        wait: seconds that a step may wait for hardware; None for no limit.
        clock, sleep: replace `time.monotonic` and `time.sleep` in back-off.

    Attributes:
        targets: the target nodes, after the choice.
        order: every node of the graph, inputs first.
        published: published outputs, by key.
        executed: nodes that were run, in the order they ended.
        notes: notes for the user about the sources; set by `look`.
    """

    def __init__(
        self,
        targets: list[Node],
        store: Store,
        log: EventLog,
        retry_command: str,
        choice: Selection = Selection(),
        wait: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.targets = resolve(targets, choice)
        self.order = topological(self.targets)
        self._store = store
        self._log = log
        self._retry_command = retry_command
        self._choice = choice
        self._wait, self._clock, self._sleep = wait, clock, sleep
        self._states = States(self.order)
        for name in choice.force:
            for node in pick(self.order, name):
                self._states[node.key].forced = True
        self._candidates: dict[str, NodeState] = {}
        self._exposed = False
        self._failures: list[str] = []
        self._corrupt: set[str] = set()  # keys of outputs that a step found damaged
        self._reasons: dict[str, str] = {}
        self._provenance: dict[str, Any] = {}
        self._stop = threading.Event()
        self._listings = Listings()
        self.notes: list[str] = []
        self.published: dict[str, Found] = {}
        self.executed: list[Node] = []

    def look(self) -> list[Node]:
        """Read the store; returns the nodes that must run, inputs first.

        Raises:
            CorruptOutput: when a needed output exists but differs from what was recorded.
            InputError: when the choice of steps is invalid.
        """
        seen = look(self.order, self._store)
        self._listings = seen.listings
        self.notes = [note for node in self.order for note in source_notes(node, seen)]
        needed = decide(self.targets, self.order, seen, self._choice, self._retry_command)
        for node in needed:
            self._states[node.key].replaces = seen.replaces(node.key)
            seen.found.pop(node.key, None)
            self._reasons[node.key] = self._reason(node, seen)
        for node in self.order:
            if (found := seen.found.get(node.key)) is not None:
                if node.key in seen.same:
                    found = self._refer(node, seen.found, found)
                    seen.found[node.key] = found
                if not found.shared:
                    confirm(found.path, found.manifest, node.identity.config)
                self.published[node.key] = found
                self._tell("hit", node, seconds=found.manifest.seconds, origin=found.origin)
        return needed

    def _reason(self, node: Node, seen: GraphState) -> str:
        if self._states[node.key].forced:
            return "--force"
        return seen.stale.get(node.key) or seen.corrupt.get(node.key) or "not built yet"

    def why_small(self, needed: list[Node]) -> str:
        """Why the nodes that `look` returned can run in this process; empty if they need Ray."""
        return why_small(self.order, needed, self._listings)

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Start no more steps; `run` returns when the running ones end, or after `STOP_SECONDS`."""
        self._stop.set()

    def run(self, backend: Backend, needed: list[Node]) -> None:
        """Execute the needed nodes.

        Raises:
            StepFailed: naming the failures, after all running steps have ended.
            Cancelled: when `stop` was called.
        """
        if needed:
            shared = provenance.collect(node.step.function for node in needed)
            self._provenance = {**shared.record, "diff": self._log.keep_diff(shared.diff)}
            self._log.emit({"event": "provenance", "git": shared.record["git"]})
        for node in needed:
            self._enqueue(node, self._reasons[node.key])
        # Published users of a step that runs may become stale; without any, `_unsettled` is empty.
        exposed = self._states.with_users(self._states.among("waiting"))
        self._exposed = not exposed.isdisjoint(self.published)
        with retry.scope(self._stop.is_set, self._log.emit):
            self._loop(backend)
        if self._failures:
            command = with_force(self._retry_command, self._corrupt, self.order)
            raise StepFailed("\n".join([*self._failures, f"  retry: {command}"]))
        if any(node.key not in self.published for node in self.targets):
            raise Cancelled("stopped; finished steps and shards are kept")

    def _loop(self, backend: Backend) -> None:
        running, waiting = self._states.among("running"), self._states.among("waiting")
        deadline = None
        while running or (waiting and self._going()):
            if self._stop.is_set() and deadline is None:
                deadline = self._clock() + STOP_SECONDS
                backend.stop()
            if deadline is not None and self._clock() > deadline:
                break
            if self._going():
                self._start(backend)
            for request, outcome in backend.poll():
                self._drain(backend)
                state = self._states[request.key]
                self._settle(state, outcome)
                if request.key not in self.published:
                    for follower in self._states.without(state):
                        backend.end(follower.node.key)
            self._drain(backend)
            if not running and self._candidates:
                self._pause()

    def _pause(self) -> None:
        """Sleep until the first candidate's back-off is over, for at most one poll interval."""
        left = min(state.not_before for state in self._candidates.values()) - self._clock()
        if left > 0:
            self._sleep(min(left, _POLL_SECONDS))

    def _going(self) -> bool:
        # A follower's failure never fails the step it follows.
        failed = self._states.among("failed").values()
        failed = any(not self._states.follows(state.node, self.published) for state in failed)
        return not (self._stop.is_set() or (failed and not self._choice.keep_going))

    def _enqueue(self, node: Node, reason: str) -> None:
        self._queue(self._states[node.key])
        self._tell("queued", node, reason=reason)

    def _queue(self, state: NodeState) -> None:
        self._states.move(state, "waiting")
        self._candidates[state.node.key] = state

    def _start(self, backend: Backend) -> None:
        unsettled, now = self._unsettled(), self._clock()
        slots = min(self._choice.jobs or backend.slots, backend.slots)
        running = self._states.among("running")
        for state in list(self._candidates.values()):
            if len(running) >= slots:
                break
            node = state.node
            waits = state.phase == "waiting"  # it may have been started since it was added
            ready = waits and self._ready(node, unsettled)
            if not (waits and (state.not_before > now or (unsettled and not ready))):
                self._candidates.pop(node.key, None)
            if not ready or state.not_before > now:
                continue
            held = contents(node, self.published, self._listings)
            fresh = state.forced or state.replaces
            same = None if fresh else self._store.same(node, held or {})
            if same is not None:
                self._states.move(state, "idle")
                self._refer(node, self.published, same)
                self._publish(node, self._found(node), None)
            else:
                self._states.move(state, "running")
                self._tell("submitted", node)
                backend.submit(self._request(state))

    def _request(self, state: NodeState) -> Request:
        request, conflicts = make_request(
            state, self._states, self.published, self._store, self._listings, self._provenance
        )
        for line in conflicts:
            message = f"an unfinished build is not resumed: {line}"
            self._tell("warning", state.node, message=message)
        return request

    def _ready(self, node: Node, unsettled: set[str]) -> bool:
        return all(
            (child.key in self.published and child.key not in unsettled)
            or (name in node.live and self._states.may_follow(node, child))
            for name, child in node.inputs.items()
        )

    def _unsettled(self) -> set[str]:
        """Waiting and running steps, and all their users, which may still become stale."""
        if not self._exposed:
            return set()
        return self._states.with_users(
            {*self._states.among("waiting"), *self._states.among("running")}
        )

    def _settle(self, state: NodeState, outcome: Outcome) -> None:
        node = state.node
        ending, state.ending, state.at_work = state.ending, False, False
        self._states.move(state, "idle")
        if outcome.transient:
            state.release_lease(self._store.path(node))
        ended = outcome.status == "stopped" or outcome.transient
        if outcome.status in ("published", "reused"):
            self._publish(node, self._found(node), outcome)
        elif ended and self._stop.is_set():
            self._tell("stopped", node, cause=outcome.cause)
        elif ended and ending:
            self._follow_later(state, "the step it follows ended without an output")
        elif outcome.resources_unavailable and self._states.follows(node, self.published):
            state.late = True
            self._follow_later(state, f"waits for the step it follows: {outcome.cause}")
        elif outcome.resources_unavailable:
            self._wait_for_resources(state, outcome)
        else:
            self._retry(state, outcome)

    def _wait_for_resources(self, state: NodeState, outcome: Outcome) -> None:
        """Queue a step again whose hardware is in use, until the user's deadline; uses no try."""
        if state.waits_since is None:
            state.waits_since = self._clock() - outcome.seconds
        seconds = self._clock() - state.waits_since
        if self._wait is not None and seconds >= self._wait:
            self._fail(state, f"{outcome.cause}; waited {seconds:.0f} s (--wait)", outcome.log)
            return
        state.delay(self._clock())
        self._tell("waiting_for_resources", state.node, cause=outcome.cause, seconds=seconds)
        self._queue(state)

    def _retry(self, state: NodeState, outcome: Outcome) -> None:
        node = state.node
        self._corrupt |= corrupt_outputs(outcome, self.order, self.published, self._store)
        if outcome.transient and state.advanced(self._store.path(node)):
            state.progressed()
        state.tries += 0 if outcome.preempted else 1
        if outcome.status == "stopped":
            self._tell("stopped", node, cause=outcome.cause)
        elif not outcome.transient:
            self._fail(state, outcome.cause, outcome.log)
        elif state.tries >= node.step.resources.tries:
            cause = f"{outcome.cause}; {state.tries} attempts without progress"
            self._fail(state, cause, outcome.log)
        elif self._going():
            state.delay(self._clock())
            self._tell("retried", node, cause=outcome.cause, tries=state.tries)
            self._queue(state)
        else:
            self._fail(state, outcome.cause, outcome.log)

    def _follow_later(self, state: NodeState, cause: str) -> None:
        """Queue a follower again that ended because of its live input, unless that one failed."""
        if state.node.key in self._states.with_users(self._states.among("failed")):
            self._tell("skipped", state.node, cause=cause)
        else:
            self._tell("retried", state.node, cause=cause, tries=state.tries)
            self._queue(state)

    def _found(self, node: Node) -> Found:
        path = self._store.path(node)
        found = manifest.load_verified(path, node.key)
        if found is None:
            raise StepFailed(f"{node.label}: reported as published, but {path} has no manifest")
        return Found(path, found)

    def _publish(self, node: Node, found: Found, outcome: Outcome | None) -> None:
        """Record a published output; `outcome` is None for one that refers to another's files."""
        self.published[node.key] = found
        if outcome is None:
            self._tell("hit", node, seconds=found.manifest.seconds, origin=found.origin)
        else:
            if outcome.status == "published":
                self.executed.append(node)
            self._tell(
                "finished",
                node,
                seconds=outcome.seconds,
                status=outcome.status,
                result=found.manifest.result,
            )
        for user in self._states.users.get(node.key, ()):
            state = self._states[user.key]
            if state.phase == "waiting":
                self._candidates[user.key] = state
            elif user.key in self.published and state.phase != "running":
                self._recheck(user)

    def _recheck(self, user: Node) -> None:
        """Queue a published step, and what it needs, if an input now has other content."""
        there = self.published[user.key]
        if reason := staleness(user, there, self.published, self._listings):
            self._exposed = True
            del self.published[user.key]
            self._states[user.key].replaces = "" if there.shared else there.manifest.attempt
            wanted = {user.key} | needed_keys(user.inputs.values(), self.published)
            for node in self.order:
                active = self._states[node.key].phase in ("waiting", "running")
                if node.key in wanted and not active:
                    self._enqueue(node, reason)

    def _refer(self, node: Node, inputs: dict[str, Found], to: Found) -> Found:
        mine = {name: inputs[child.key] for name, child in node.inputs.items()}
        return refer(self._store, node, mine, self._listings.of(node), to, SAME_INPUTS)

    def _fail(self, state: NodeState, cause: str, log: str) -> None:
        node = state.node
        self._tell("failed", node, cause=cause, log=log)
        self._states.move(state, "failed")
        lines = [f"step {node.label} failed: {cause}"]
        if log:
            lines.append(f"  log:   {log}")
        self._failures.append("\n".join(lines))
        for key in self._states.with_users({node.key}) - {node.key}:
            later = self._states[key]
            if later.phase == "waiting":
                self._candidates.pop(key, None)
                self._states.move(later, "idle")
                self._tell("skipped", later.node, cause=f"{node.label} failed")

    def _drain(self, backend: Backend) -> None:
        for event in backend.events():
            state = self._states.get(event.get("key", ""))
            if state is not None and event["event"] == "started":
                state.attempt = event["attempt"]
            if state is not None and state.phase == "running":
                for follower in self._states.on_event(state, event["event"]):
                    self._candidates[follower.node.key] = follower
            self._log.emit(event)

    def _tell(self, kind: str, node: Node, **details: Any) -> None:
        self._log.emit({"event": kind, "step": node.label, "key": node.key, **details})
