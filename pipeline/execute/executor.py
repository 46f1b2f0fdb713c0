"""The driver's loop: which step runs when, what happens to a failure.

A step starts when its inputs are published and settled; one that follows a live input (see
`live.py`) starts when that input's step is at work, and ends, to start again later, should that
step be lost: so it never holds what the other one waits for. Whoever executes a step follows
`attempt.py`; this loop only places requests, counts tries, and reads events. Retries are ours
alone: a step whose worker died or whose storage failed is tried again as a new attempt; a refused
input is not.

A step whose output would be made from the same contents as one that is there is not run: its
output refers to that one. A step that was there and whose input came out differently is run.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from pipeline.errors import Cancelled, PonenteError, StepFailed
from pipeline.execute.attempt import Outcome, Request
from pipeline.execute.backend import Backend
from pipeline.execute.events import EventLog
from pipeline.execute.followers import Followers
from pipeline.execute.reference import refer
from pipeline.graph.live import Source
from pipeline.graph.node import Node, topological
from pipeline.identity import digests, provenance
from pipeline.plan.listings import Listings
from pipeline.plan.plan import source_notes
from pipeline.plan.state import (
    Selection,
    contents,
    decide,
    look,
    needed_keys,
    pick,
    resolve,
    staleness,
)
from pipeline.store import lease, manifest
from pipeline.store.builds import claim_build
from pipeline.store.ledger import Ledger
from pipeline.store.outputs import Found, Store

STOP_SECONDS = 30.0

logger = logging.getLogger("ponente")


class Execution:
    """Brings targets up to date in one store.

    Args:
        targets: the nodes whose outputs are wanted.
        store: where outputs are.
        log: where events go.
        retry_command: what to print so that a user can go on after a failure.
        choice: which part of the graph, and how.

    Attributes:
        targets: the nodes wanted, after the choice.
        order: every node of the graph, inputs first.
        published: outputs that are there, by key.
        executed: nodes that were run, in the order they ended.
        notes: what a user should know of the sources, once `look` has returned.
    """

    def __init__(
        self,
        targets: list[Node],
        store: Store,
        log: EventLog,
        retry_command: str,
        choice: Selection = Selection(),
    ) -> None:
        self.targets = resolve(targets, choice)
        self.order = topological(self.targets)
        self._store = store
        self._log = log
        self._retry_command = retry_command
        self._choice = choice
        self._users: dict[str, list[Node]] = {}
        for node in self.order:
            for child in node.inputs.values():
                self._users.setdefault(child.key, []).append(node)
        self._waiting: dict[str, Node] = {}
        self._candidates: dict[str, Node] = {}
        self._running: dict[str, Node] = {}
        self._forced = {node.key for name in choice.force for node in pick(self.order, name)}
        self._exposed = False
        self._replaces: dict[str, str] = {}
        self._tries: dict[str, int] = {}
        self._recorded: dict[str, frozenset[str]] = {}
        self._attempts: dict[str, str] = {}
        self._failures: list[str] = []
        self._failed: list[Node] = []
        self._builds: dict[str, str] = {}
        self._followers = Followers(self._users)
        self._provenance: dict[str, Any] = {}
        self._stop = threading.Event()
        self._listings = Listings()
        self.notes: list[str] = []
        self.published: dict[str, Found] = {}
        self.executed: list[Node] = []

    def look(self) -> list[Node]:
        """Read the store; returns the nodes that must run, inputs first.

        Raises:
            CorruptOutput: when a needed output is there but is not what was recorded.
            InputError: when the choice of steps cannot be followed.
        """
        seen = look(self.order, self._store)
        self._listings = seen.listings
        self.notes = [note for node in self.order for note in source_notes(node, seen)]
        needed = decide(self.targets, self.order, seen, self._choice)
        for node in needed:
            self._replaces[node.key] = seen.replaces(node.key)
            seen.found.pop(node.key, None)
        for node in self.order:
            if (found := seen.found.get(node.key)) is not None:
                if node.key in seen.same:
                    found = self._refer(node, seen.found, found)
                    seen.found[node.key] = found
                self.published[node.key] = found
                self._tell("hit", node, seconds=found.manifest.seconds, origin=found.origin)
        return needed

    def stop(self) -> None:
        """Start nothing more, and end once what runs has ended or `STOP_SECONDS` have passed."""
        self._stop.set()

    def run(self, backend: Backend, needed: list[Node]) -> None:
        """Execute the needed nodes.

        Raises:
            StepFailed: after everything already running has ended, naming the failures.
            Cancelled: when `stop` was called.
        """
        shared = provenance.collect(node.step.function for node in needed)
        self._provenance = {**shared.record, "diff": self._log.keep_diff(shared.diff)}
        for node in needed:
            self._enqueue(node)
        # A published step above one that runs can turn stale; without any, nothing needs watching.
        self._exposed = not self._with_users(set(self._waiting)).isdisjoint(self.published)
        deadline = None
        while self._running or (self._waiting and self._going()):
            if self._stop.is_set() and deadline is None:
                deadline = time.monotonic() + STOP_SECONDS
                backend.stop()
            if deadline is not None and time.monotonic() > deadline:
                break
            if self._going():
                self._start(backend)
            for request, outcome in backend.poll():
                self._drain(backend)
                node = self._running.pop(request.key)
                self._settle(node, outcome)
                if node.key not in self.published:
                    for follower in self._followers.without(node, self._running):
                        backend.end(follower.key)
            self._drain(backend)
        if self._failures:
            retry = f"  retry: {self._retry_command}"
            raise StepFailed("\n".join([*self._failures, retry]))
        if any(node.key not in self.published for node in self.targets):
            raise Cancelled("stopped; finished steps and shards are kept")

    def _going(self) -> bool:
        # What a follower fails at costs nobody the step it follows.
        failed = any(not self._follows(node) for node in self._failed)
        return not (self._stop.is_set() or (failed and not self._choice.keep_going))

    def _follows(self, node: Node) -> bool:
        """Whether a live input of the node is still to come."""
        gone = self.published.keys() | {failed.key for failed in self._failed}
        return any(node.inputs[name].key not in gone for name in node.live)

    def _enqueue(self, node: Node) -> None:
        self._waiting[node.key] = self._candidates[node.key] = node
        self._tell("queued", node)

    def _start(self, backend: Backend) -> None:
        candidates, self._candidates = self._candidates, {}
        unsettled = self._unsettled()
        for node in candidates.values():
            if node.key not in self._waiting:
                continue  # an output found on the way made it a candidate twice
            full = len(self._running) >= min(self._choice.jobs or backend.slots, backend.slots)
            if full or not self._ready(node, unsettled):
                if full or unsettled:
                    self._candidates[node.key] = node
                continue
            del self._waiting[node.key]
            held = contents(node, self.published, self._listings)
            fresh = node.key in self._forced or self._replaces.get(node.key)
            same = None if fresh else self._store.same(node, held or {})
            if same is not None:
                self._refer(node, self.published, same)
                self._publish(node, self._found(node), None)
            else:
                self._running[node.key] = node
                backend.submit(self._request(node))

    def _ready(self, node: Node, unsettled: set[str]) -> bool:
        return all(
            (child.key in self.published and child.key not in unsettled)
            or (name in node.live and self._followers.may_follow(node, child))
            for name, child in node.inputs.items()
        )

    def _unsettled(self) -> set[str]:
        """Steps that are to run, and published ones that what those make could yet turn stale."""
        return self._with_users({*self._waiting, *self._running}) if self._exposed else set()

    def _with_users(self, keys: set[str]) -> set[str]:
        reached = set(keys)
        for node in self.order:
            if any(child.key in reached for child in node.inputs.values()):
                reached.add(node.key)
        return reached

    def _request(self, node: Node) -> Request:
        live = {name: self._source(node.inputs[name]) for name in sorted(node.live)}
        held = self._listings.digests(node) | {
            name: live[name].build if name in live else self.published[child.key].manifest.content
            for name, child in node.inputs.items()
        }
        replaces, root = self._replaces.get(node.key, ""), self._store.path(node)
        recipe, config = digests.recipe(node.identity, held), node.identity.config
        build = claim_build(root, recipe, replaces, config)
        for line in build.conflicts:
            self._tell("warning", node, message=f"an unfinished build is not resumed: {line}")
        self._builds[node.key] = build.id
        return Request(
            step=node.step,
            label=node.label,
            key=node.key,
            root=root,
            inputs={name: (self._place(n), n.key) for name, n in node.inputs.items()},
            arguments={**node.config, **node.runtime},
            identity=node.identity,
            build=build.id,
            provenance=self._provenance,
            replaces=replaces,
            live=live,
            listings=self._listings.of(node),
        )

    def _place(self, node: Node) -> str:
        there = self.published.get(node.key)
        return there.path if there is not None else self._store.path(node)

    def _source(self, node: Node) -> Source:
        """Where a live input is, or was, made."""
        known = self._builds.get(node.key)
        made = known or self.published[node.key].manifest.build
        replaces = "" if node.key in self.published else self._replaces.get(node.key, "")
        return Source(made, replaces, {**node.config, **node.runtime})

    def _settle(self, node: Node, outcome: Outcome) -> None:
        told_to_end = self._followers.settled(node)
        if outcome.transient:
            self._release(node)
        if outcome.status in ("published", "reused"):
            self._publish(node, self._found(node), outcome)
        elif (outcome.status == "stopped" or outcome.transient) and self._stop.is_set():
            self._tell("stopped", node, cause=outcome.cause)
        elif told_to_end and (outcome.status == "stopped" or outcome.transient):
            self._follow_later(node, "the step it follows ended without an output")
        elif outcome.resources_unavailable and self._follows(node):
            self._followers.wait(node)
            self._follow_later(node, f"waits for the step it follows: {outcome.cause}")
        else:
            self._try_again(node, outcome)

    def _try_again(self, node: Node, outcome: Outcome) -> None:
        tries = self._tries.get(node.key, 0)
        if outcome.transient and not outcome.preempted and self._advanced(node):
            tries = 0
        tries += 0 if outcome.preempted else 1
        self._tries[node.key] = tries
        if outcome.status == "stopped":
            self._tell("stopped", node, cause=outcome.cause)
        elif outcome.transient and tries < node.step.resources.tries and self._going():
            self._tell("retried", node, cause=outcome.cause, tries=tries)
            self._waiting[node.key] = self._candidates[node.key] = node
        else:
            self._fail(node, outcome)

    def _advanced(self, node: Node) -> bool:
        """Whether a step finished a shard or a checkpoint since it was last lost.

        A run of weeks loses more machines than it has tries; only a step that gets no further is
        given up.
        """
        ledger = Ledger(self._store.path(node), self._builds[node.key])
        try:
            names = ledger.names()
        except (PonenteError, OSError):
            return False
        before = self._recorded.get(node.key, frozenset())
        self._recorded[node.key] = names
        return not names <= before

    def _follow_later(self, node: Node, cause: str) -> None:
        """A follower that ended by no fault of its own waits again, unless nothing will come."""
        if node.key in self._with_users({failed.key for failed in self._failed}):
            self._tell("skipped", node, cause=cause)
        else:
            self._tell("retried", node, cause=cause, tries=self._tries.get(node.key, 0))
            self._waiting[node.key] = self._candidates[node.key] = node

    def _found(self, node: Node) -> Found:
        path = self._store.path(node)
        found = manifest.load_verified(path, node.key)
        if found is None:
            raise StepFailed(f"{node.label}: its worker said published, but {path} has no manifest")
        return Found(path, found)

    def _publish(self, node: Node, found: Found, outcome: Outcome | None) -> None:
        """Take note of an output: of an attempt of ours or somebody's, or (None) of a reference."""
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
        for user in self._users.get(node.key, ()):
            if user.key in self._waiting:
                self._candidates[user.key] = user
            elif user.key in self.published and user.key not in self._running:
                self._recheck(user)

    def _recheck(self, user: Node) -> None:
        """Queue a published step whose input turned out to hold something else."""
        there = self.published[user.key]
        if staleness(user, there, self.published, self._listings):
            self._exposed = True
            del self.published[user.key]
            self._replaces[user.key] = "" if there.shared else there.manifest.attempt
            wanted = {user.key} | needed_keys(user.inputs.values(), self.published)
            for node in self.order:
                if node.key in wanted - set(self._waiting) - set(self._running):
                    self._enqueue(node)

    def _refer(self, node: Node, inputs: dict[str, Found], to: Found) -> Found:
        mine = {name: inputs[child.key] for name, child in node.inputs.items()}
        return refer(self._store, node, mine, self._listings.of(node), to, "same inputs")

    def _fail(self, node: Node, outcome: Outcome) -> None:
        self._tell("failed", node, cause=outcome.cause, log=outcome.log)
        self._failed.append(node)
        lines = [f"step {node.label} failed: {outcome.cause}"]
        if outcome.log:
            lines.append(f"  log:   {outcome.log}")
        self._failures.append("\n".join(lines))
        for key in self._with_users({node.key}):
            self._candidates.pop(key, None)
            if (later := self._waiting.pop(key, None)) is not None:
                self._tell("skipped", later, cause=f"{node.label} failed")

    def _drain(self, backend: Backend) -> None:
        for event in backend.events():
            if event["event"] == "started":
                self._attempts[event["key"]] = event["attempt"]
            if (node := self._running.get(event.get("key", ""))) is not None:
                begun = node.key in self._attempts
                for follower in self._followers.hear(node, event["event"], begun=begun):
                    if follower.key in self._waiting:
                        self._candidates[follower.key] = follower
            self._log.emit(event)

    def _release(self, node: Node) -> None:
        """Release the lease of an attempt whose worker is lost: nobody need wait for its silence.

        Should the worker live after all, publishing is safe as ever.
        """
        attempt, path = self._attempts.pop(node.key, ""), self._store.path(node)
        try:
            owner = lease.holder(path) if attempt else None
            if owner is not None and owner["number"] == int(attempt.partition("-")[0]):
                lease.end(path)
        except (PonenteError, OSError) as error:
            logger.warning("%s: the lease cannot be released: %s", path, error)

    def _tell(self, kind: str, node: Node, **details: Any) -> None:
        self._log.emit({"event": kind, "step": node.label, "key": node.key, **details})
