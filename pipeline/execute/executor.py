"""The driver's loop: which step runs when, and what happens after a failure.

A step starts when its inputs are published and settled; one that follows a live input starts when
that input's step is at work, and is cancelled and queued again if that step is lost. This loop
alone decides about retries, with back-off: a refused input is not retried, and waiting for hardware
or a preemption uses no try. A published step is run again when an input was rebuilt with other
content; an output made from the same contents is referred to by an alias.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from pipeline import events
from pipeline.errors import Cancelled, InputError, StepFailed, one_line
from pipeline.events import Event
from pipeline.execute.backend import Backend
from pipeline.execute.driver_store import DriverStore
from pipeline.execute.errands import Errands
from pipeline.execute.event_log import EventLog
from pipeline.execute.node_state import NodePhase, NodeState, States
from pipeline.execute.request import Ending, Outcome
from pipeline.graph.order import topological
from pipeline.graph.step import Node
from pipeline.identity import provenance
from pipeline.plan.listings import Listings
from pipeline.plan.plan import source_notes
from pipeline.plan.state import (
    NOT_BUILT,
    Selection,
    contents,
    decide,
    needed_keys,
    pick,
    read_state,
    rebuilt_input,
    resolve,
    same_output,
    with_force,
)
from pipeline.store import retry, storage
from pipeline.store.builds import Build
from pipeline.store.outputs import Found, Store

_POLL_SECONDS = 0.2


class Execution:
    """Brings targets up to date in one store.

    `retry_command` resumes the run, to be printed after a failure, and `unforced` is the same
    without --force; `wait` is for how many seconds a step may wait for hardware, None for no limit.
    `refuse` says why a step may not be started now.
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
        refuse: Callable[[Node], str] = lambda node: "",
        unforced: str = "",
    ) -> None:
        self.targets = resolve(targets, choice)
        self.order = topological(self.targets)
        self._log = log
        self._retry_command, self._unforced = retry_command, unforced or retry_command
        self._choice = choice
        self._wait, self._clock, self._sleep, self._refuse = wait, clock, sleep, refuse
        self._states = States(self.order)
        self._there = DriverStore(store, self._states, keep_shards=choice.keep_shards)
        for name in choice.force:
            for node in pick(self.order, name):
                self._states[node.key].forced = True
        self._failures: list[str] = []
        self._corrupt: set[str] = set()  # keys of outputs that a step found damaged
        self._reasons: dict[str, str] = {}
        self._stop = threading.Event()
        local = storage.is_local(store.prefix)
        self._errands = Errands(local, self._stop.is_set, log.emit, clock)
        self.notes: list[str] = []
        self.published = self._there.published
        self.executed: list[Node] = []

    def look(self) -> list[Node]:
        """Read the store; returns the nodes that must run, inputs first."""
        # What is there, patiently: a store that does not answer now may in a minute.
        insist = partial(self._errands.insist, sleep=self._sleep)
        store = self._there.store
        seen = insist(store.prefix, partial(read_state, self.order, store))
        self._there.listings = seen.listings
        self.notes = [note for node in self.order for note in source_notes(node, seen)]
        # What must run, and why; what it replaces is no output from now on.
        needed = decide(self.targets, self.order, seen, self._choice, self._retry_command)
        for node in needed:
            state, key = self._states[node.key], node.key
            state.replaces = seen.replaces(key)
            seen.found.pop(key, None)
            why = "--force" if state.forced else seen.stale.get(key) or seen.corrupt.get(key)
            self._reasons[key] = why or NOT_BUILT
        # The others are hits, and their outputs this run's.
        for node in self.order:
            if node.key in seen.found:
                found = insist(node.label, partial(self._there.reuse, node, seen))
                self.published[node.key] = seen.found[node.key] = found
                self._tell(node, events.Hit(found.manifest.seconds, found.elsewhere))
        return needed

    @property
    def listings(self) -> Listings:
        return self._there.listings

    def stop(self) -> None:
        self._stop.set()

    def run(self, backend: Backend, needed: list[Node]) -> None:
        if needed:
            for node in needed:  # now: a file may be edited while others run
                self._states.code_of(node)
            shared = provenance.collect(f for node in needed for f in node.functions)
            self._there.provenance = {**shared.record, "diff": self._log.keep_diff(shared.diff)}
            self._log.emit(events.Provenance(shared.record["git"]))
        for node in needed:
            self._enqueue(node, self._reasons[node.key])
        with retry.scope(self._stop.is_set, self._log.emit):
            try:
                self._loop(backend)
            finally:
                self._errands.close()
        if self._failures:
            raise StepFailed("\n".join([*self._failures, f"  retry: {self._retry_line()}"]))
        if any(node.key not in self.published for node in self.targets):
            raise Cancelled("stopped; finished steps and shards are kept")

    def _retry_line(self) -> str:
        """The command to repeat: --force without the steps that this run has built again."""
        forced = {key for key, state in self._states.items() if state.forced}
        built = forced & {node.key for node in self.executed}
        again = forced - built | self._corrupt if built else self._corrupt
        return with_force(self._unforced if built else self._retry_command, again, self.order)

    def _loop(self, backend: Backend) -> None:
        running, waiting = map(self._states.among, (NodePhase.RUNNING, NodePhase.WAITING))
        stopped = False
        while running or self._errands or (waiting and self._going()):
            # A stop is passed on once; what runs then may take long to save and end.
            if self._stop.is_set() and not stopped:
                stopped = True
                backend.stop()
            # The store's answers come first: a published input lets its users start.
            self._errands.poll()
            if self._going():
                self._start(backend)
            # A step's last events are read before its outcome, which follows from them.
            for request, outcome in backend.poll():
                self._drain(backend)
                self._settle(self._states[request.key], outcome, backend)
            self._drain(backend)
            if not running:
                self._pause()

    def _pause(self) -> None:
        """Sleep until an operation or a back-off is over, for at most one poll interval."""
        seconds, candidates = _POLL_SECONDS, self._states.candidates.values()
        if candidates and self._going() and not self._states.among(NodePhase.REQUESTING):
            first = min(state.not_before for state in candidates) - self._clock()
            seconds = min(seconds, max(first, 0.0))
        if self._errands:
            self._errands.pause(self._sleep, seconds)
        elif candidates and seconds > 0:
            self._sleep(seconds)

    def _going(self) -> bool:
        if self._stop.is_set() or self._choice.keep_going:
            return not self._stop.is_set()
        # A follower's failure never fails the step it follows.
        failed = self._states.among(NodePhase.FAILED).values()
        return all(self._states.follows(state.node, self.published) for state in failed)

    def _enqueue(self, node: Node, reason: str) -> None:
        self._states.move(self._states[node.key], NodePhase.WAITING)
        self._tell(node, events.Queued(reason))

    def _start(self, backend: Backend) -> None:
        slots = min(self._choice.jobs or backend.slots, backend.slots)
        running, requesting = map(self._states.among, (NodePhase.RUNNING, NodePhase.REQUESTING))
        candidates, now, later = self._states.candidates, self._clock(), []
        # A stop that comes while a step is requested makes it a candidate again.
        while candidates and self._going() and len(running) + len(requesting) < slots:
            _, state = candidates.popitem(last=False)
            if not self._ready(state.node):
                continue  # it is a candidate again when an input is settled
            if state.not_before > now:
                later.append(state)
            else:
                self._request(state, backend)
        candidates.update((state.node.key, state) for state in later)

    def _ready(self, node: Node) -> bool:
        states, late = self._states, self._states[node.key].late
        return all(
            (child.key in self.published and not states[child.key].unsettled)
            or (name in node.live and states[child.key].at_work and not late)
            for name, child in node.inputs.items()
        )

    def _request(self, state: NodeState, backend: Backend) -> None:
        """Claim the build of a ready node and submit it, unless it was made from equal contents."""
        node, fresh = state.node, state.forced or state.replaces
        there, code = self._there, self._states.code_of(node)
        held = None if fresh else contents(node, self.published, there.listings)
        made = there.made_from(node)

        def ask() -> Found | tuple[Build, list[str]]:
            same = same_output(node, there.store, held or {})
            if same is not None:
                return there.reuse_same(node, same, self.published)
            return there.claim(state, made, code)

        def claimed(found: Found | tuple[Build, list[str]]) -> None:
            if isinstance(found, Found):
                self._states.move(state, NodePhase.IDLE)
                self._publish(node, found, None)
            elif state.phase is NodePhase.REQUESTING and self._going() and self._ready(node):
                self._submit(state, *found, backend)
            elif state.phase is NodePhase.REQUESTING:
                self._states.move(state, NodePhase.WAITING)

        failed = partial(self._end_without_output, state, Outcome(Ending.FAILED), backend)
        self._states.move(state, NodePhase.REQUESTING)
        self._errands.begin(f"{node.label}, to be started", ask, claimed, failed)

    def _submit(
        self, state: NodeState, build: Build, warnings: list[str], backend: Backend
    ) -> None:
        for message in warnings:
            self._tell(state.node, events.Warned(message))
        try:
            why = self._refuse(state.node)
        except InputError as error:  # of a step that was up to date when the run began
            why = str(error)
        if why:
            return self._fail(state, why, "", f"step {state.node.label} is refused")
        request = self._there.make_request(state, build)
        self._states.move(state, NodePhase.RUNNING)
        self._tell(state.node, events.Submitted())
        backend.submit(request)

    def _settle(self, state: NodeState, outcome: Outcome, backend: Backend) -> None:
        """Read what an ended attempt published or recorded, then decide how to go on."""
        node, attempt, state.attempt, state.at_work = state.node, state.attempt, "", False
        self._states.move(state, NodePhase.SETTLING)
        if not outcome.successful:
            self._end_followers(state, backend)
        read = partial(self._there.read_ended, node, outcome, state.build, attempt)
        done = partial(self._settled, state, outcome)
        failed = partial(self._end_without_output, state, outcome, backend)
        self._errands.begin(f"{node.label}, which has ended", read, done, failed)

    def _end_without_output(
        self, state: NodeState, outcome: Outcome, backend: Backend, error: Exception
    ) -> None:
        """End a step about which the store cannot be asked; what it published is kept."""
        cause = "; then ".join(filter(None, (outcome.cause, one_line(error))))
        self._end_followers(state, backend)
        if self._stop.is_set():
            self._states.move(state, NodePhase.IDLE)
            self._tell(state.node, events.Stopped(cause))
        else:
            unread = f"output of step {state.node.label}, which was published, cannot be read"
            self._fail(state, cause, outcome.log, unread if outcome.successful else "")

    def _end_followers(self, state: NodeState, backend: Backend) -> None:
        for follower in self._states.without(state):
            backend.end(follower.node.key)

    def _settled(self, state: NodeState, outcome: Outcome, read: Any) -> None:
        node = state.node
        ending, state.ending = state.ending, False
        self._states.move(state, NodePhase.IDLE)
        ended = outcome.ending is Ending.STOPPED or outcome.transient
        if outcome.successful:
            self._publish(node, read, outcome)
        elif ended and self._stop.is_set():
            self._tell(node, events.Stopped(outcome.cause))
        elif ended and ending:
            self._follow_later(state, "the step it follows ended without an output")
        elif outcome.ending is Ending.UNAVAILABLE and self._states.follows(node, self.published):
            state.late = True
            self._follow_later(state, f"waits for the step it follows: {outcome.cause}")
        elif outcome.ending is Ending.UNAVAILABLE:
            self._wait_for_resources(state, outcome)
        else:
            self._retry(state, outcome, read)

    def _wait_for_resources(self, state: NodeState, outcome: Outcome) -> None:
        """Queue a step again whose hardware is in use, until the user's deadline; uses no try."""
        seconds = state.waited(outcome, self._clock())
        if self._wait is not None and seconds >= self._wait:
            self._fail(state, f"{outcome.cause}; waited {seconds:.0f} s (--wait)", outcome.log)
            return
        state.delay(self._clock())
        self._tell(state.node, events.WaitingForResources(outcome.cause, seconds))
        self._states.move(state, NodePhase.WAITING)

    def _retry(self, state: NodeState, outcome: Outcome, recorded: frozenset[str]) -> None:
        # Not its own unfinished build: --force would drop what that has finished.
        others = [node for node in self.order if node.key != state.node.key]
        self._corrupt |= self._there.corrupt_outputs(outcome, others)
        final = state.lost(outcome, recorded)
        if outcome.ending is Ending.STOPPED:
            self._tell(state.node, events.Stopped(outcome.cause))
        elif final or not self._going():
            self._fail(state, final or outcome.cause, outcome.log)
        else:
            state.delay(self._clock())
            preempted = outcome.ending is Ending.PREEMPTED
            self._tell(state.node, events.Retried(outcome.cause, state.tries, preempted))
            self._states.move(state, NodePhase.WAITING)

    def _follow_later(self, state: NodeState, cause: str) -> None:
        """Queue a follower again that ended because of its live input, unless that one failed."""
        if state.node.key in self._states.with_users(self._states.among(NodePhase.FAILED)):
            self._tell(state.node, events.Skipped(cause))
        else:
            self._tell(state.node, events.Retried(cause, state.tries))
            self._states.move(state, NodePhase.WAITING)

    def _publish(self, node: Node, found: Found, outcome: Outcome | None) -> None:
        """Record a published output; `outcome` is None for one that refers to another's files."""
        self.published[node.key] = found
        if outcome is None:
            self._tell(node, events.Hit(found.manifest.seconds, found.elsewhere))
        else:
            if outcome.ending is Ending.PUBLISHED:
                self.executed.append(node)
            result = found.manifest.result
            self._tell(node, events.Finished(outcome.seconds, outcome.ending.value, result))
        for user in self._states.users.get(node.key, ()):
            if user.key in self.published and self._states[user.key].phase is NodePhase.IDLE:
                self._recheck(user)

    def _recheck(self, user: Node) -> None:
        """Queue a published step, and what it needs, if an input now has other content."""
        there = self.published[user.key]
        if reason := rebuilt_input(user, there, self.published):
            del self.published[user.key]
            self._states[user.key].replaces = "" if there.shared else there.manifest.attempt
            wanted = {user.key} | needed_keys(user.inputs.values(), self.published)
            for state in sorted((self._states[k] for k in wanted), key=lambda s: s.index):
                if state.phase in (NodePhase.IDLE, NodePhase.FAILED):
                    self._enqueue(state.node, reason)

    def _fail(self, state: NodeState, cause: str, log: str, what: str = "") -> None:
        node = state.node
        self._tell(node, events.Failed(cause, log))
        self._states.move(state, NodePhase.FAILED)
        lines = [f"{what or f'step {node.label} failed'}: {cause}"]
        if log:
            lines.append(f"  log:   {log}")
        self._failures.append("\n".join(lines))
        for key in self._states.with_users({node.key}) - {node.key}:
            later = self._states[key]
            if later.phase in (NodePhase.WAITING, NodePhase.REQUESTING):
                self._states.move(later, NodePhase.IDLE)
                self._tell(later.node, events.Skipped(f"{node.label} failed"))

    def _drain(self, backend: Backend) -> None:
        for event in backend.events():
            if (state := self._states.get(event.key)) is not None:
                self._states.apply(state, event)
            self._log.emit(event)

    def _tell(self, node: Node, event: Event) -> None:
        self._log.emit(msgspec.structs.replace(event, step=node.label, key=node.key))
