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


def reuse(store: Store, node: Node, seen: GraphState) -> Found:
    """The node's output that was found; published in the node's own directory if it was another's.

    Records the configuration for which it is reused.
    """
    found = seen.found[node.key]
    if node.key in seen.same:
        found = reuse_same(store, node, seen.found, seen.listings, found)
    if not found.shared:
        confirm(found.path, found.manifest, node.identity.config)
    return found


def reuse_same(
    store: Store, node: Node, published: Mapping[str, Found], listings: Listings, same: Found
) -> Found:
    inputs = {name: published[child.key] for name, child in node.inputs.items()}
    return refer(store, node, inputs, listings.of(node), same, SAME_INPUTS)


def made_from(
    node: Node, states: States, published: Mapping[str, Found], listings: Listings
) -> dict[str, str]:
    """What the action digest of a node's build holds: contents, and the builds of live inputs."""
    return listings.digests(node) | {
        name: _source(states[child.key], published).build
        if name in node.live
        else published[child.key].manifest.content
        for name, child in node.inputs.items()
    }


def make_request(
    state: NodeState,
    build: Build,
    states: States,
    published: Mapping[str, Found],
    store: Store,
    listings: Listings,
    provenance: Mapping[str, Any],
    *,
    keep_shards: bool,
) -> Request:
    """The request that executes a node in a claimed build, which is recorded in `state`.

    `provenance` is what all steps of the run share; `keep_shards` reuses shards of other code.
    """
    node, code = state.node, states.code_of(state.node)

    def opened(name: str, child: Node) -> Input:
        there = published.get(child.key)
        live = _source(states[child.key], published) if name in node.live else None
        if there is None:
            return Input(store.path(child), child.key, child.label, live=live)
        attempt = "" if there.manifest.alias else there.manifest.attempt
        return Input(there.path, child.key, child.label, attempt, live)

    # Top-level packages and modules of the step's own code.
    tops = (file.partition("/")[0].removesuffix(".py") for file in code["sources"])
    state.build, state.attempt = build.id, ""
    return Request(
        step=node.step,
        label=node.label,
        key=node.key,
        root=store.path(node),
        inputs={name: opened(name, child) for name, child in node.inputs.items()},
        arguments={**node.config, **node.runtime},
        identity=node.identity,
        build=build.id,
        provenance={**provenance, **code},
        replaces=state.replaces,
        listings=listings.of(node),
        packages=tuple(sorted({"__main__", *tops})),
        keep_shards=keep_shards,
        environment={n: os.environ[n] for n in node.step.environment if n in os.environ},
        link=store.link,
    )


def _source(state: NodeState, published: Mapping[str, Found]) -> Source:
    node = state.node
    made = state.build or published[node.key].manifest.build
    replaces = "" if node.key in published else state.replaces
    return Source(made, replaces, {**node.config, **node.runtime})


def claim(
    store: Store, state: NodeState, contents: Mapping[str, str], code: Mapping[str, Any]
) -> tuple[Build, list[str]]:
    """The build that the next attempt belongs to, and warnings; for `contents` see `made_from`."""
    node, path = state.node, store.path(state.node)
    digest = digests.action(node.identity, contents)
    # What replaces an output is a build of its own, and a retry belongs to that of its first try.
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
    store: Store, node: Node, outcome: Outcome, build: str, attempt: str
) -> Found | frozenset[str]:
    """The output that an ended attempt reported as published; else what its build has recorded.

    The lease of an attempt that was lost is released, so that no one waits for it. Publishing stays
    safe even if its worker is still alive.
    """
    path = store.path(node)
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


def corrupt_outputs(
    outcome: Outcome, order: list[Node], published: Mapping[str, Found], store: Store
) -> set[str]:
    """Keys of the output in which a failed attempt found a damaged file: the first in its cause."""

    def place(node: Node) -> int:
        there = published.get(node.key)
        home = there.manifest.home(there.path) if there is not None else store.path(node)
        return outcome.cause.find(home)

    places = {node.key: place(node) for node in order} if outcome.ending is Ending.CORRUPT else {}
    first = min((at for at in places.values() if at >= 0), default=-1)
    return {key for key, at in places.items() if at == first >= 0}
