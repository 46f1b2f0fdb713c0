"""What a store has of a graph, and what is therefore to be done: read by `plan` and the executor.

Nothing is written or run. An output is stale when an input of it, under the same key, holds other
content now than the output was made from, or one of its sources holds other files. So is one that
was made with a default that has another value now.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.errors import CorruptOutput, InputError, unknown
from pipeline.graph.node import Node, topological, unique_labels
from pipeline.identity.listing import difference
from pipeline.plan.listings import Listings, list_all
from pipeline.store import storage
from pipeline.store.builds import changed_defaults
from pipeline.store.manifest import source_files
from pipeline.store.outputs import Found, Store
from pipeline.store.parallel import concurrently

DAMAGED = "damaged"


@dataclass(frozen=True)
class Selection:
    """Which part of a graph a user asked for; steps by label, or by directory.

    Attributes:
        only: run nothing but these.
        until: bring up these and what they need, instead of the experiment's targets.
        force: build these again although they are there.
        keep_going: after a failure, continue with what does not depend on it.
        jobs: steps at once; 0 for as many as there are resources.
    """

    only: tuple[str, ...] = ()
    until: tuple[str, ...] = ()
    force: tuple[str, ...] = ()
    keep_going: bool = False
    jobs: int = 0


@dataclass
class GraphState:
    """What is there of a graph, by node key.

    Attributes:
        found: outputs that can be used.
        same: those of `found` that were made for another key, from inputs of the same content.
        stale: why an output that is there cannot be used.
        damaged: what is wrong with an output that is there.
        attempts: attempt behind each output in the user's own store, usable or not.
        listings: what the sources of the graph stand for now.
    """

    found: dict[str, Found] = field(default_factory=dict)
    same: set[str] = field(default_factory=set)
    stale: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    attempts: dict[str, str] = field(default_factory=dict)
    listings: Listings = field(default_factory=Listings)

    def replaces(self, key: str) -> str:
        """What a build of this key takes the place of: an attempt, or empty for nothing."""
        return DAMAGED if key in self.damaged else self.attempts.get(key, "")


def look(order: list[Node], store: Store) -> GraphState:
    """Look at every node of `order`, which lists inputs before users."""
    seen = GraphState(listings=list_all(order))

    def find(node: Node) -> Found | CorruptOutput | None:
        try:
            return store.find(node)
        except CorruptOutput as error:
            return error

    for node, found in zip(
        order,
        concurrently(find, order, local=storage.is_local(store.prefix)),
        strict=True,
    ):
        if isinstance(found, CorruptOutput):
            seen.damaged[node.key] = " ".join(str(found).split())
            continue
        if found is not None:
            if not found.shared:
                seen.attempts[node.key] = found.manifest.attempt
            if reason := staleness(node, found, seen.found, seen.listings):
                seen.stale[node.key] = reason
            else:
                seen.found[node.key] = found
        elif (same := same_inputs(node, store, seen.found, seen.listings)) is not None:
            seen.found[node.key] = same
            seen.same.add(node.key)
    return seen


def staleness(node: Node, found: Found, inputs: dict[str, Found], listings: Listings) -> str:
    """Why `found` is not what the node would make now; empty when it is.

    Its key is the node's, so what its configuration has otherwise are defaults that were changed.
    """
    sources = listings.of(node)
    if lines := changed_defaults(found.path, found.manifest, node.identity.config, sources):
        return "; ".join(lines)
    for name, listing in sources.items():
        was = found.manifest.sources.get(name)
        if was is not None and was.digest != listing.digest:
            return f"{name} changed: {difference(was, source_files(found.path, was), listing)}"
    for name, child in node.inputs.items():
        # An adopted output may not say which inputs it had; then there is nothing to compare.
        recorded = found.manifest.inputs.get(name)
        now = inputs.get(child.key)
        if recorded and now is not None and recorded["digest"] != now.manifest.content:
            return f"input {name} ({child.label}) was built again and holds other content"
    return ""


def contents(node: Node, found: dict[str, Found], listings: Listings) -> dict[str, str] | None:
    """Content digest of each input and source; None while one of them is not there."""
    if node.key in listings.unreachable:
        return None
    if any(child.key not in found for child in node.inputs.values()):
        return None
    made_from = {name: found[child.key].manifest.content for name, child in node.inputs.items()}
    return made_from | listings.digests(node)


def same_inputs(
    node: Node, store: Store, found: dict[str, Found], listings: Listings
) -> Found | None:
    """An output made for another key from the same contents, if there is one."""
    held = contents(node, found, listings)
    return store.same(node, held) if held is not None else None


def needed_keys(targets: Iterable[Node], there: set[str] | dict[str, Found]) -> set[str]:
    """Keys of the steps to execute: targets not there, and what those need, in turn."""
    needed: set[str] = set()
    stack = list(targets)
    while stack:
        node = stack.pop()
        if node.key not in there and node.key not in needed:
            needed.add(node.key)
            stack.extend(node.inputs.values())
    return needed


def pick(order: list[Node], name: str) -> list[Node]:
    """The nodes a user means: by label (see `unique_labels`), by the step's name, or by the
    beginning of a directory.

    Raises:
        InputError: naming the steps there are.
    """
    apart = unique_labels(order)
    chosen = (
        [n for n in order if name in (n.label, apart[n.key])]
        or [n for n in order if name == n.step.name]
        or [n for n in order if name and n.directory.startswith(name)]
    )
    if not chosen:
        raise InputError(unknown("step", name, apart.values()))
    return chosen


def resolve(targets: list[Node], choice: Selection) -> list[Node]:
    """The targets a choice leaves: its `until` steps, its `only` steps, or the experiment's."""
    order = topological(targets)
    names = choice.until or choice.only
    return [node for name in names for node in pick(order, name)] if names else targets


def decide(
    targets: list[Node], order: list[Node], seen: GraphState, choice: Selection
) -> list[Node]:
    """The nodes to execute, inputs first: what is missing, and what is stale below an output.

    What was made from a stale output is executed later, when that comes out differently.

    Raises:
        InputError: when `only` leaves out a step whose output is missing.
        CorruptOutput: when a step to execute would have to replace damaged files unasked.
        InputError, StoreUnavailable: when a source of a step to execute cannot be listed.
    """
    forced = {node.key for name in choice.force for node in pick(order, name)}
    chosen = {node.key for name in choice.only for node in pick(order, name)}
    stale = [n for n in order if n.key in seen.stale and (not choice.only or n.key in chosen)]
    there = {key for key in seen.found if key not in forced}
    needed = needed_keys([*targets, *stale], there)
    needed |= forced
    for node in order:
        if node.key in forced:
            needed |= needed_keys(node.inputs.values(), seen.found)
    if choice.only:
        _refuse_missing(needed - chosen, order, choice)
    for key, problem in seen.damaged.items():
        if key in needed and key not in forced:
            raise CorruptOutput(problem)
    for node in order:
        if node.key in needed and node.key in seen.listings.unreachable:
            raise seen.listings.unreachable[node.key]
    return [node for node in order if node.key in needed]


def _refuse_missing(needed: set[str], order: list[Node], choice: Selection) -> None:
    missing = [node.label for node in order if node.key in needed]
    if missing:
        raise InputError(
            f"--only {' '.join(choice.only)}: what it needs is not there: {', '.join(missing)}; "
            f"use --until to build that too"
        )
