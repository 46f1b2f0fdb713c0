"""The executor's state of each node, and which steps may follow a live input.

A step is at work when it reports progress or a finished shard, or when it waits for another run
that does its work. Steps that read it as a live input may start then, and end when it ends without
an output.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import PonenteError
from pipeline.execute.attempt import Outcome, Request
from pipeline.graph.live import Source
from pipeline.graph.node import Node
from pipeline.identity import digests, source_code
from pipeline.plan.listings import Listings
from pipeline.store import lease, manifest, retry
from pipeline.store.builds import claim_build
from pipeline.store.ledger import Ledger
from pipeline.store.outputs import Found, Store

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
_AT_WORK = ("progress", "shard")

logger = logging.getLogger("ponente")


@dataclass
class NodeState:
    """One node of a run.

    Attributes:
        node: the node.
        phase: idle (nothing to do, or published), waiting, running or failed.
        forced: whether to build it again although its output exists.
        replaces: attempt of the published output that is to be replaced; empty if none.
        build: id of its build, which names its ledger; see `digests.build_id`.
        attempt: the running attempt, once it has begun.
        tries: attempts since it last made progress.
        recorded: shards recorded when an attempt was last lost.
        not_before: time of the clock before which it is not started again.
        waits_since: time of the clock since which it waits for hardware; None when it does not.
        at_work: whether it has its hardware and works, so that others may follow it.
        ending: whether it was cancelled because the step it follows was lost.
        late: whether it must wait until the step it follows has ended, for want of hardware.
    """

    node: Node
    phase: str = "idle"
    forced: bool = False
    replaces: str = ""
    build: str = ""
    attempt: str = ""
    tries: int = 0
    recorded: frozenset[str] = frozenset()
    not_before: float = 0.0
    waits_since: float | None = None
    at_work: bool = False
    ending: bool = False
    late: bool = False
    _pauses: Iterator[float] = field(default_factory=lambda: iter(()))

    def delay(self, now: float) -> None:
        """Start it again only after a back-off, which grows until `progressed` is called."""
        pause = next(self._pauses, None)
        if pause is None:
            self._pauses = retry.pauses(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
            pause = next(self._pauses)
        self.not_before = now + pause

    def progressed(self) -> None:
        """Record progress: reset its tries, its wait and its back-off."""
        self.tries, self.waits_since, self._pauses = 0, None, iter(())

    def advanced(self, path: str) -> bool:
        """Whether the step in `path` recorded a shard or a checkpoint since it was last lost.

        A run of weeks loses more machines than it has tries; only a step without progress fails.
        """
        try:
            names = Ledger(path, self.build).names()
        except (PonenteError, OSError):
            return False
        before, self.recorded = self.recorded, names
        return not names <= before

    def release_lease(self, path: str) -> None:
        """Release the lease of an attempt whose worker is lost, so that no one waits for it.

        Publishing stays safe even if the worker is still alive.
        """
        attempt, self.attempt = self.attempt, ""
        try:
            owner = lease.holder(path) if attempt else None
            if owner is not None and owner.number == int(attempt.partition("-")[0]):
                lease.end(path)
        except (PonenteError, OSError) as error:
            logger.warning("%s: the lease cannot be released: %s", path, error)


class States(dict[str, NodeState]):
    """The states of a graph's nodes, by key and by phase."""

    def __init__(self, order: list[Node]) -> None:
        super().__init__((node.key, NodeState(node)) for node in order)
        self._order = order
        self._phases: dict[str, dict[str, NodeState]] = {}
        self.users: dict[str, list[Node]] = {}
        for node in order:
            for child in node.inputs.values():
                self.users.setdefault(child.key, []).append(node)

    def move(self, state: NodeState, phase: str) -> None:
        """Move a node to another phase."""
        self.among(state.phase).pop(state.node.key, None)
        state.phase = phase
        self.among(phase)[state.node.key] = state

    def among(self, phase: str) -> dict[str, NodeState]:
        """The nodes in a phase, in the order they entered it; the dict changes with `move`."""
        return self._phases.setdefault(phase, {})

    def with_users(self, keys: Iterable[str]) -> set[str]:
        """Keys of these nodes and of all nodes that depend on them."""
        reached = set(keys)
        for node in self._order:
            if any(child.key in reached for child in node.inputs.values()):
                reached.add(node.key)
        return reached

    def follows(self, node: Node, published: Mapping[str, object]) -> bool:
        """Whether a live input of the node may still be published."""
        keys = [node.inputs[name].key for name in node.live]
        return any(key not in published and self[key].phase != "failed" for key in keys)

    def may_follow(self, node: Node, child: Node) -> bool:
        """Whether `node` may start although its live input `child` is not published."""
        return self[child.key].at_work and not self[node.key].late

    def on_event(self, state: NodeState, event: str) -> list[NodeState]:
        """Update the state of a running step for an event; returns the followers that may start."""
        begun = bool(state.attempt)
        if begun and event in _AT_WORK:
            state.waits_since = None
        if state.at_work or not (event == "waiting" or (begun and event in _AT_WORK)):
            return []
        state.at_work = True
        return [follower for follower in self._followers(state) if follower.phase == "waiting"]

    def without(self, state: NodeState) -> list[NodeState]:
        """Running followers of a step that ended without an output; marks them as ending."""
        ending = [
            follower
            for follower in self._followers(state)
            if follower.phase == "running" and not follower.ending
        ]
        for follower in ending:
            follower.ending = True
        return ending

    def _followers(self, state: NodeState) -> Iterator[NodeState]:
        key = state.node.key
        for user in self.users.get(key, ()):
            if any(user.inputs[name].key == key for name in user.live):
                yield self[user.key]


def corrupt_outputs(
    outcome: Outcome, order: list[Node], published: Mapping[str, Found], store: Store
) -> set[str]:
    """Keys of the outputs in which a failed attempt found a damaged file, which its cause names."""

    def home(node: Node) -> str:
        there = published.get(node.key)
        return there.manifest.home(there.path) if there is not None else store.path(node)

    return {node.key for node in order if outcome.corrupt and home(node) in outcome.cause}


def make_request(
    state: NodeState,
    states: States,
    published: Mapping[str, Found],
    store: Store,
    listings: Listings,
    provenance: Mapping[str, Any],
) -> tuple[Request, tuple[str, ...]]:
    """The request that executes a node; claims its build and records the id in `state`.

    Returns:
        (request, differences of an unfinished build that cannot be resumed, one line per field).
    """
    node = state.node
    live = {name: _source(states[node.inputs[name].key], published) for name in sorted(node.live)}
    held = listings.digests(node) | {
        name: live[name].build if name in live else published[child.key].manifest.content
        for name, child in node.inputs.items()
    }

    def place(child: Node) -> str:
        there = published.get(child.key)
        return there.path if there is not None else store.path(child)

    root, identity = store.path(node), node.identity
    build = claim_build(root, digests.recipe(identity, held), state.replaces, identity.config, held)
    state.build, state.attempt = build.id, ""
    request = Request(
        step=node.step,
        label=node.label,
        key=node.key,
        root=root,
        inputs={name: (place(child), child.key) for name, child in node.inputs.items()},
        arguments={**node.config, **node.runtime},
        identity=identity,
        build=build.id,
        provenance=provenance,
        replaces=state.replaces,
        live=live,
        listings=listings.of(node),
        labels={name: child.label for name, child in node.inputs.items()},
        packages=_packages(node),
        reads={
            manifest.make_ref(root, place(child)): _opened(published.get(child.key))
            for name, child in node.inputs.items()
        },
    )
    return request, build.conflicts


def _opened(found: Found | None) -> str:
    """The attempt that published an input; empty where it is not known, as for an alias."""
    return found.manifest.attempt if found is not None and found.manifest.origin is None else ""


def _packages(node: Node) -> tuple[str, ...]:
    """Top-level packages and modules of a step's own code."""
    files = source_code.digests(node.step.function)
    return tuple(sorted({"__main__", *(f.partition("/")[0].removesuffix(".py") for f in files)}))


def _source(state: NodeState, published: Mapping[str, Found]) -> Source:
    """The build of a live input, running or finished."""
    node = state.node
    made = state.build or published[node.key].manifest.build
    replaces = "" if node.key in published else state.replaces
    return Source(made, replaces, {**node.config, **node.runtime})
