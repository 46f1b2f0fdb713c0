"""What a store has of a graph, and what is therefore to be done: read by `plan` and the executor.

Nothing is written or run. An output is stale when an input of it, under the same key, holds other
content now than the output was made from: the input was rebuilt and came out differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.errors import CorruptOutput, InputError, unknown
from pipeline.graph.step import Node, topological, unique_labels
from pipeline.store.outputs import Found, Store

DAMAGED = "damaged"


@dataclass(frozen=True)
class Selection:
    """Which part of a graph a user asked for; steps by label, or by directory.

    Attributes:
        only: run nothing but these.
        until: bring up these and what they need, instead of the experiment's targets.
        force: build these again although they are there.
        keep_going: after a failure, go on with what does not depend on it.
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
    """

    found: dict[str, Found] = field(default_factory=dict)
    same: set[str] = field(default_factory=set)
    stale: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    attempts: dict[str, str] = field(default_factory=dict)

    def replaces(self, key: str) -> str:
        """What a build of this key takes the place of: an attempt, or empty for nothing."""
        return DAMAGED if key in self.damaged else self.attempts.get(key, "")


def look(order: list[Node], store: Store) -> GraphState:
    """Look at every node of `order`, which lists inputs before users."""
    seen = GraphState()
    for node in order:
        try:
            found = store.find(node)
        except CorruptOutput as error:
            seen.damaged[node.key] = str(error)
            continue
        if found is not None:
            if not found.shared:
                seen.attempts[node.key] = found.manifest.attempt
            if reason := staleness(node, found, seen.found):
                seen.stale[node.key] = reason
            else:
                seen.found[node.key] = found
        elif (same := same_inputs(node, store, seen.found)) is not None:
            seen.found[node.key] = same
            seen.same.add(node.key)
    return seen


def staleness(node: Node, found: Found, inputs: dict[str, Found]) -> str:
    """Why `found` does not belong to the inputs that are there now; empty when it does."""
    for name, child in node.inputs.items():
        # An adopted output may not say which inputs it had; then there is nothing to compare.
        recorded = found.manifest.inputs.get(name)
        now = inputs.get(child.key)
        if recorded and now is not None and recorded["digest"] != now.manifest.content:
            return f"input {name} ({child.label}) was built again and holds other content"
    return ""


def contents(node: Node, found: dict[str, Found]) -> dict[str, str] | None:
    """Content digest of each input; None while one of them is not there."""
    if any(child.key not in found for child in node.inputs.values()):
        return None
    return {name: found[child.key].manifest.content for name, child in node.inputs.items()}


def same_inputs(node: Node, store: Store, found: dict[str, Found]) -> Found | None:
    """An output made for another key from inputs of the same content, if there is one."""
    held = contents(node, found)
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
    """The nodes a user means: by label (see `unique_labels`), or by a directory's beginning.

    Raises:
        InputError: naming the steps there are.
    """
    apart = unique_labels(order)
    chosen = [n for n in order if name in (n.label, apart[n.key])] or [
        n for n in order if name and n.directory.startswith(name)
    ]
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
    """The nodes to execute, inputs first.

    Raises:
        InputError: when `only` leaves out a step whose output is missing.
        CorruptOutput: when a step to execute would have to replace damaged files unasked.
    """
    forced = {node.key for name in choice.force for node in pick(order, name)}
    needed = needed_keys(targets, {k: f for k, f in seen.found.items() if k not in forced})
    needed |= forced
    for node in order:
        if node.key in forced:
            needed |= needed_keys(node.inputs.values(), seen.found)
    if choice.only:
        _refuse_missing(needed, order, choice)
    for key, problem in seen.damaged.items():
        if key in needed and key not in forced:
            raise CorruptOutput(problem)
    return [node for node in order if node.key in needed]


def _refuse_missing(needed: set[str], order: list[Node], choice: Selection) -> None:
    chosen = {node.key for name in choice.only for node in pick(order, name)}
    missing = [node.label for node in order if node.key in needed - chosen]
    if missing:
        raise InputError(
            f"--only {' '.join(choice.only)}: what it needs is not there: {', '.join(missing)}; "
            f"use --until to build that too"
        )
