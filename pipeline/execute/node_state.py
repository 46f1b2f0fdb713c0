"""The executor's state of each node, and which steps may follow a live input.

A step is at work, and may be followed, when it reports progress or a finished shard, or waits for
another run that does its work.
"""

from __future__ import annotations

import enum
import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline import events
from pipeline.events import Event
from pipeline.execute.request import Ending, Outcome
from pipeline.graph.step import Node
from pipeline.identity.source_code import record
from pipeline.store import retry

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0


class NodePhase(enum.Enum):
    """What the driver does with a node."""

    IDLE = "idle"
    WAITING = "waiting"  # for inputs, resources or a back-off
    REQUESTING = "requesting"  # its build from the store
    RUNNING = "running"
    SETTLING = "settling"  # what the ended attempt published is read from the store
    FAILED = "failed"


_MOVES = {
    NodePhase.IDLE: {NodePhase.WAITING, NodePhase.FAILED},
    NodePhase.WAITING: {NodePhase.REQUESTING, NodePhase.IDLE},
    NodePhase.REQUESTING: {NodePhase.RUNNING, NodePhase.WAITING, NodePhase.IDLE, NodePhase.FAILED},
    NodePhase.RUNNING: {NodePhase.SETTLING},
    NodePhase.SETTLING: {NodePhase.IDLE, NodePhase.FAILED},
    NodePhase.FAILED: {NodePhase.WAITING},
}


@dataclass(eq=False)
class NodeState:
    """One node of a run."""

    node: Node
    index: int  # its position in the graph's order
    phase: NodePhase = NodePhase.IDLE
    forced: bool = False  # build it again although its output exists
    replaces: str = ""  # attempt of the published output that is to be replaced
    build: str = ""  # id of its build, which names its ledger
    attempt: str = ""  # the running one, once it has begun
    tries: int = 0  # attempts since it last made progress
    recorded: frozenset[str] = frozenset()  # shards recorded when an attempt was last lost
    not_before: float = 0.0  # time of the clock before which it is not started again
    waits_since: float | None = None  # time of the clock since which it waits for hardware
    at_work: bool = False  # it has its hardware and works, so that others may follow it
    ending: bool = False  # it was cancelled because the step it follows was lost
    late: bool = False  # it must wait until the step it follows has ended, for want of hardware
    unsettled_inputs: int = 0
    _pauses: Iterator[float] = field(default_factory=lambda: iter(()))

    def delay(self, now: float) -> None:
        """Start it again only after a back-off, which grows until it makes progress."""
        pause = next(self._pauses, None)
        if pause is None:
            self._pauses = retry.pauses(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
            pause = next(self._pauses)
        self.not_before = now + pause

    def waited(self, outcome: Outcome, now: float) -> float:
        """Seconds for which it has waited for its hardware, which the outcome lacked."""
        if self.waits_since is None:
            self.waits_since = now - outcome.seconds
        return now - self.waits_since

    @property
    def unsettled(self) -> bool:
        """Whether it is built, or may become stale because an input is built."""
        return self.phase not in (NodePhase.IDLE, NodePhase.FAILED) or self.unsettled_inputs > 0

    def lost(self, outcome: Outcome, recorded: frozenset[str]) -> str:
        """Count a try of an attempt that failed; returns why it is final, empty to retry.

        A run of weeks loses more machines than it has tries: only a step that recorded no shard and
        no checkpoint between losses fails.
        """
        if not outcome.transient:
            return outcome.cause
        if not recorded <= self.recorded:
            self.tries, self.waits_since, self._pauses = 0, None, iter(())
        self.recorded = recorded
        self.tries += outcome.ending is not Ending.PREEMPTED
        if self.tries >= self.node.step.resources.tries:
            return f"{outcome.cause}; {self.tries} attempts without progress"
        return ""


class States(dict[str, NodeState]):
    """The states of a graph's nodes, by key and by phase."""

    def __init__(self, order: list[Node]) -> None:
        super().__init__((node.key, NodeState(node, i)) for i, node in enumerate(order))
        self._phases: dict[NodePhase, dict[str, NodeState]] = {phase: {} for phase in NodePhase}
        self.candidates: OrderedDict[str, NodeState] = OrderedDict()
        self._record = functools.cache(record)
        self.users: dict[str, list[Node]] = {}
        for node in order:
            for child in node.inputs.values():
                self.users.setdefault(child.key, []).append(node)

    def code_of(self, node: Node) -> dict[str, Any]:
        """The code of a node's step when it was asked for first, see `source_code.record`."""
        return self._record(*node.functions)

    def move(self, state: NodeState, phase: NodePhase) -> None:
        assert phase is state.phase or phase in _MOVES[state.phase], (state.phase, phase)
        before = state.unsettled
        self.among(state.phase).pop(state.node.key, None)
        state.phase = phase
        self.among(phase)[state.node.key] = state
        if phase is NodePhase.WAITING:
            self.candidates[state.node.key] = state
        else:
            self.candidates.pop(state.node.key, None)
        changed = [state] if state.unsettled != before else []
        while changed:
            source = changed.pop()
            for node in self.users.get(source.node.key, ()):
                user = self[node.key]
                before = user.unsettled
                user.unsettled_inputs += 1 if source.unsettled else -1
                if user.unsettled != before:
                    changed.append(user)
                elif user.phase is NodePhase.WAITING and not source.unsettled:
                    self.candidates[user.node.key] = user

    def among(self, phase: NodePhase) -> dict[str, NodeState]:
        """The nodes in a phase, in the order they entered it; the dict changes with `move`."""
        return self._phases[phase]

    def with_users(self, keys: Iterable[str]) -> set[str]:
        """Keys of these nodes and of all nodes that depend on them."""
        reached, stack = set(), list(keys)
        while stack:
            key = stack.pop()
            if key not in reached:
                reached.add(key)
                stack += [user.key for user in self.users.get(key, ())]
        return reached

    def follows(self, node: Node, published: Mapping[str, object]) -> bool:
        keys = [node.inputs[name].key for name in node.live]
        return any(key not in published and self[key].phase is not NodePhase.FAILED for key in keys)

    def apply(self, state: NodeState, event: Event) -> None:
        """Update the state of a step for an event of its worker; its followers may start then."""
        if isinstance(event, events.Started):
            state.attempt = event.attempt
        if state.phase is not NodePhase.RUNNING:
            return
        works = bool(state.attempt) and isinstance(event, events.Progress | events.ShardFinished)
        if works:
            state.waits_since = None
        if state.at_work or not (works or isinstance(event, events.Waiting)):
            return
        state.at_work = True
        for follower in self._followers(state):
            if follower.phase is NodePhase.WAITING:
                self.candidates[follower.node.key] = follower

    def without(self, state: NodeState) -> list[NodeState]:
        """Running followers of a step that ended without an output; marks them as ending."""
        running = (f for f in self._followers(state) if f.phase is NodePhase.RUNNING)
        ending = [follower for follower in running if not follower.ending]
        for follower in ending:
            follower.ending = True
        return ending

    def _followers(self, state: NodeState) -> Iterator[NodeState]:
        key = state.node.key
        for user in self.users.get(key, ()):
            if any(user.inputs[name].key == key for name in user.live):
                yield self[user.key]
