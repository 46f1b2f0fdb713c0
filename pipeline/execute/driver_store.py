"""What the driver asks of the store about a step: its build, and what an ended attempt left."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from pipeline.errors import InputError, PonenteError, StoreUnavailable
from pipeline.execute.node_state import NodeState, States
from pipeline.execute.reference import refer
from pipeline.execute.request import Ending, Input, Outcome, Request
from pipeline.graph.artifact import Source
from pipeline.graph.step import Node
from pipeline.identity import digests, source_code
from pipeline.plan.listings import Listings
from pipeline.plan.plan import giving_up
from pipeline.plan.state import GraphState, foreign, foreign_build
from pipeline.store import lease, manifest
from pipeline.store.builds import Build, claim_code, confirm, find_build
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import SAME_INPUTS
from pipeline.store.outputs import Found, Store

logger = logging.getLogger("ponente")


class DriverStore:
    """A run's store, and what the run has published there.

    `provenance` is what all steps of the run share; with `keep_shards` unfinished builds keep the
    shards of other code.
    """

    def __init__(self, store: Store, states: States, *, keep_shards: bool) -> None:
        self.store, self._states, self._keep_shards = store, states, keep_shards
        self.published: dict[str, Found] = {}
        self.listings = Listings()
        self.provenance: dict[str, Any] = {}

    def reuse(self, node: Node, seen: GraphState) -> Found:
        """The node's output that was found, as its own; records the configuration it is for."""
        found = seen.found[node.key]
        if node.key in seen.same:
            found = self.reuse_same(node, found, seen.found)
        if not found.shared:
            confirm(found.path, found.manifest, node.identity.config)
        return found

    def reuse_same(self, node: Node, same: Found, there: Mapping[str, Found]) -> Found:
        """Publish another output as the node's; `there` has the node's inputs, by key."""
        inputs = {name: there[child.key] for name, child in node.inputs.items()}
        return refer(self.store, node, inputs, self.listings.of(node), same, SAME_INPUTS)

    def made_from(self, node: Node) -> dict[str, str]:
        """What the action digest of a node's build holds: contents, and builds of live inputs."""
        return self.listings.digests(node) | {
            name: self._source(child.key).build
            if name in node.live
            else self.published[child.key].manifest.content
            for name, child in node.inputs.items()
        }

    def make_request(self, state: NodeState, build: Build) -> Request:
        """The request that executes a node in a claimed build, which is recorded in `state`."""
        node, code = state.node, self._states.code_of(state.node)
        # Top-level packages and modules of the step's own code.
        tops = (file.partition("/")[0].removesuffix(".py") for file in code["sources"])
        state.build, state.attempt = build.id, ""
        return Request(
            step=node.step,
            label=node.label,
            key=node.key,
            root=self.store.path(node),
            inputs={name: self._input(node, name) for name in node.inputs},
            arguments={**node.config, **node.runtime},
            identity=node.identity,
            build=build.id,
            provenance={**self.provenance, **code},
            replaces=state.replaces,
            listings=self.listings.of(node),
            packages=tuple(sorted({"__main__", *tops})),
            keep_shards=self._keep_shards,
            environment={n: os.environ[n] for n in node.step.environment if n in os.environ},
            link=self.store.link,
        )

    def _input(self, node: Node, name: str) -> Input:
        child = node.inputs[name]
        there = self.published.get(child.key)
        live = self._source(child.key) if name in node.live else None
        if there is None:
            return Input(self.store.path(child), child.key, child.label, live=live)
        attempt = "" if there.manifest.alias else there.manifest.attempt
        return Input(there.path, child.key, child.label, attempt, live)

    def _source(self, key: str) -> Source:
        state = self._states[key]
        made = state.build or self.published[key].manifest.build
        replaces = "" if key in self.published else state.replaces
        return Source(made, replaces, {**state.node.config, **state.node.runtime})

    def claim(
        self, state: NodeState, contents: Mapping[str, str], code: Mapping[str, Any]
    ) -> tuple[Build, list[str]]:
        """The build that the next attempt belongs to, and warnings; `contents`: see `made_from`."""
        node, path = state.node, self.store.path(state.node)
        digest = digests.action(node.identity, contents)
        # What replaces an output is a build of its own; a retry belongs to that of its first try.
        forced = state.forced and not (state.replaces or state.build)
        own = node.identity.config
        build = find_build(path, digest, state.replaces, own, contents, forced=forced, claim=True)
        ledger = Ledger(path, build.id, source_code.code_digest(code))
        if problem := foreign_build(node, ledger):
            raise InputError(problem)
        claim_code(ledger, code)
        lines = [f"an unfinished build is not resumed: {line}" for line in build.conflicts]
        return build, [*lines, *giving_up(path, build)]

    def read_ended(
        self, node: Node, outcome: Outcome, build: str, attempt: str
    ) -> Found | frozenset[str]:
        """The output that an ended attempt reported as published, else the shards of its build.

        The lease of an attempt that was lost is released, so that no one waits for it. Publishing
        stays safe even if its worker is still alive.
        """
        path = self.store.path(node)
        if outcome.successful:
            if (found := manifest.load_verified(path, node.key)) is None:
                raise StoreUnavailable(f"reported as published, but {path} shows no manifest")
            if problem := foreign(node, Found(path, found)):
                raise InputError(problem)
            return Found(path, found)
        if not outcome.transient:
            return frozenset()
        try:
            owner = lease.holder(path) if attempt else None
            if owner is not None and owner.number == int(attempt.partition("-")[0]):
                lease.end(path)
            return Ledger(path, build).names()
        except OSError:
            raise
        except PonenteError as error:
            logger.warning("%s: the lost attempt cannot be cleared: %s", path, error)
            return frozenset()

    def corrupt_outputs(self, outcome: Outcome, nodes: list[Node]) -> set[str]:
        """Keys of the output in which an attempt found a damaged file: the first in its cause."""
        if outcome.ending is not Ending.CORRUPT:
            return set()
        places: dict[str, int] = {}
        for node in nodes:
            there = self.published.get(node.key)
            home = there.manifest.home(there.path) if there else self.store.path(node)
            if (at := outcome.cause.find(home)) >= 0:
                places[node.key] = at
        return {key for key, at in places.items() if at == min(places.values())}
