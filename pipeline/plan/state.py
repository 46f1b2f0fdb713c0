"""The state of a graph in a store, and the steps to execute: for `plan` and the executor.

An output is stale when one of its inputs, under the same key, now has other content than the output
was made from, when one of its sources has other files, or when it was made with a default that has
another value now.
"""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import CorruptOutput, InputError, unknown
from pipeline.graph.module_names import HOME, NEIGHBOURS
from pipeline.graph.order import topological, unique_labels
from pipeline.graph.step import Node
from pipeline.identity import source_code
from pipeline.identity.listing import difference
from pipeline.plan.listings import Listings, list_all
from pipeline.store import storage
from pipeline.store.builds import changed_defaults, other_codes
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import ADOPTED, source_files
from pipeline.store.outputs import Found, Store
from pipeline.store.parallel import by_item, concurrently

R = TypeVar("R")
CORRUPT, FOREIGN = "corrupt", "foreign"
NOT_BUILT = "not built yet"  # why a run executes a step without an output


@dataclass(frozen=True)
class Selection:
    """The part of a graph to run; steps are given by label or by directory."""

    only: tuple[str, ...] = ()
    until: tuple[str, ...] = ()  # these and their inputs, instead of the experiment's targets
    force: tuple[str, ...] = ()  # build these again although their outputs exist
    keep_going: bool = False  # after a failure, with the steps that do not depend on it
    jobs: int = 0  # the most concurrent steps; 0 for as many as there are resources
    keep_shards: bool = False  # of unfinished builds, also those that other code of a step wrote

    def __post_init__(self) -> None:
        if type(self.jobs) is not int or self.jobs < 0:
            raise InputError(
                f"jobs: expected a number of steps, or 0 for as many as the resources allow; got "
                f"{self.jobs!r}"
            )


@dataclass
class GraphState:
    """The existing outputs of a graph, by node key: those to reuse, and why others cannot be."""

    found: dict[str, Found] = field(default_factory=dict)
    same: set[str] = field(default_factory=set)  # found for another key, from the same contents
    stale: dict[str, str] = field(default_factory=dict)
    corrupt: dict[str, str] = field(default_factory=dict)
    foreign: dict[str, str] = field(default_factory=dict)  # of another step of this name
    # The attempt that published each output in the user's own store, also stale ones.
    attempts: dict[str, str] = field(default_factory=dict)
    listings: Listings = field(default_factory=Listings)

    def replaces(self, key: str) -> str:
        """The attempt whose output a build of this key replaces; empty for none."""
        return CORRUPT if key in self.corrupt else self.attempts.get(key, "")


def read_state(order: list[Node], store: Store) -> GraphState:
    """Read the state of every node of `order`, which has inputs before users."""
    seen = GraphState(listings=list_all(order))

    def find(node: Node) -> Found | CorruptOutput | None:
        try:
            return store.find(node)
        except CorruptOutput as error:
            return error

    answers = by_item(find, order, store.prefix)

    def settle(node: Node) -> None:
        found = answers[node]
        if isinstance(found, CorruptOutput):
            seen.corrupt[node.key] = " ".join(str(found).split())
            return
        if found is not None:
            if not found.shared:
                seen.attempts[node.key] = found.manifest.attempt
            if problem := foreign(node, found):
                seen.foreign[node.key] = problem
            elif reason := staleness(node, found, seen.found, seen.listings):
                seen.stale[node.key] = reason
            else:
                seen.found[node.key] = found
        elif (held := contents(node, seen.found, seen.listings)) is not None and (
            same := same_output(node, store, held)
        ) is not None:
            seen.found[node.key] = same
            seen.same.add(node.key)

    inputs_first(settle, order, store)
    return seen


def inputs_first(function: Callable[[Node], R], order: list[Node], store: Store) -> dict[str, R]:
    """`function(node)` by key; called for the inputs of a node before it is for the node.

    On a remote store it is called for several nodes at a time.
    """
    local, depths, found = storage.is_local(store.prefix), dict[str, int](), dict[str, R]()
    levels: list[list[Node]] = [[*order]] if local else []
    for node in () if local else order:
        depth = depths[node.key] = 1 + max(
            (depths[n.key] for n in node.inputs.values()), default=-1
        )
        levels += [[]] if depth == len(levels) else []
        levels[depth].append(node)
    for level in levels:
        answers = concurrently(function, level, store.prefix)
        found |= zip((node.key for node in level), answers, strict=True)
    return found


def staleness(node: Node, found: Found, inputs: dict[str, Found], listings: Listings) -> str:
    """Why the output `found`, of the node's key, is stale for it; empty when it is not."""
    sources = listings.of(node)
    if lines := changed_defaults(found.path, found.manifest, node.identity.config, sources):
        return "; ".join(lines)
    for name, listing in sources.items():
        was = found.manifest.sources.get(name)
        if was is not None and was.digest != listing.digest:
            files = source_files(found.path, was)
            if not listing.same_as(files):
                return f"{name} changed: {difference(was, files, listing)}"
    return rebuilt_input(node, found, inputs)


def rebuilt_input(node: Node, found: Found, inputs: dict[str, Found]) -> str:
    for name, child in node.inputs.items():
        # The manifest of an adopted output may lack inputs, or name those of the output that was
        # adopted: these cannot be compared.
        recorded, now = found.manifest.inputs.get(name), inputs.get(child.key)
        if recorded is None or now is None or recorded["key"] != child.key:
            continue
        if recorded["digest"] != now.manifest.content:
            return f"input {name} ({child.label}) was built again and holds other content"
    return ""


def contents(node: Node, found: dict[str, Found], listings: Listings) -> dict[str, str] | None:
    """Content digest of each input and source; None while one of them is missing."""
    if node.key in listings.unreachable:
        return None
    if any(child.key not in found for child in node.inputs.values()):
        return None
    made_from = {name: found[child.key].manifest.content for name, child in node.inputs.items()}
    return made_from | listings.digests(node)


def same_output(node: Node, store: Store, held: Mapping[str, str]) -> Found | None:
    found = store.same(node, held)
    return found if found is not None and not foreign(node, found) else None


def foreign(node: Node, found: Found) -> str:
    """Why an output is that of another step of this name; empty when it is not, or was adopted."""
    alias = found.manifest.alias
    if alias is not None and alias.kind == ADOPTED:
        return ""
    there = other_step(node, found.manifest.provenance)
    return f"{node.label}: the output in {found.path} is {is_another(node, there)}" if there else ""


def foreign_build(node: Node, ledger: Ledger) -> str:
    """Why an unfinished build is that of another step of this name; empty when it is not."""
    for code in other_codes(ledger):
        if there := other_step(node, code):
            return f"an unfinished build in {ledger.root} is {is_another(node, there)}"
    return ""


def other_step(node: Node, recorded: Mapping[str, Any]) -> str:
    """As `source_code.other_step`, also of the functions in the node's configuration.

    A step of this library may move within its package.
    """
    function = node.step.function
    package, moved = function.__module__.partition(".")[0], False
    if package in NEIGHBOURS and Path(inspect.getfile(function)).is_relative_to(HOME / package):
        defined = recorded.get("defined")
        files = [defined["file"]] if defined else recorded.get("sources") or ()
        moved = any(name.startswith(f"{package}/") for name in files)
    if not moved and (there := source_code.other_step(function, recorded)):
        return there
    for called in node.functions[1:]:
        about = recorded.get("called", {}).get(called.__qualname__)
        if about and (there := source_code.other_step(called, {**recorded, "defined": about})):
            return there
    return ""


def is_another(node: Node, there: str) -> str:
    """The end of a sentence on what a step of the same name in the file `there` has built."""
    here = node.step.function.__code__.co_filename
    return (
        f"that of another step named {node.step.name!r}, in {there}; this one is in {here}; give "
        f'one of them another name, @step(name="..."), build it again with --force {node.label}, '
        f"or adopt what is there: ponente adopt FILE {node.label}"
    )


def needed_keys(targets: Iterable[Node], there: set[str] | dict[str, Found]) -> set[str]:
    needed: set[str] = set()
    stack = list(targets)
    while stack:
        node = stack.pop()
        if node.key not in there and node.key not in needed:
            needed.add(node.key)
            stack.extend(node.inputs.values())
    return needed


def pick(order: list[Node], names: str) -> list[Node]:
    """The nodes that a flag names: one step or several, separated by commas.

    A name is a label, which may hold commas itself, or a step's name, or the beginning of a
    directory.
    """
    apart = unique_labels(order)

    def called(name: str) -> list[Node]:
        return (
            [n for n in order if name == apart[n.key] or name in n.labels]
            or [n for n in order if name == n.step.name]
            or [n for n in order if name and n.directory.startswith(name)]
        )

    known = [*apart.values(), *sorted({label for n in order for label in n.labels})]
    return list({n.key: n for n in each_named(names, called, "step", known)}.values())


def each_named(
    names: str, called: Callable[[str], list[R]], what: str, known: Iterable[str]
) -> Iterator[R]:
    """What `called` finds for each of the names, which commas separate, and which may hold commas.

    Raises `InputError` for a name that it finds nothing for, with the nearest that is `known`.
    """
    words = names.split(",")
    while words:
        ends = range(len(words), 0, -1)  # the longest name first
        end = next((end for end in ends if called(",".join(words[:end]).strip())), 0)
        if not end and words[0].strip():
            raise InputError(unknown(what, words[0].strip(), dict.fromkeys(known)))
        yield from called(",".join(words[:end]).strip()) if end else ()
        words = words[end or 1 :]


def with_force(command: str, keys: Collection[str], order: list[Node]) -> str:
    """A command line, or a call in Python, that also builds the nodes of these keys again."""
    names = tuple(label for key, label in unique_labels(order).items() if key in keys)
    if not names:
        return command
    if command.endswith(")"):  # a shell's words end with quotes where they hold a parenthesis
        return f"{command[:-1]}{'' if command.endswith('()') else ', '}force={names!r})"
    return f"{command} --force {shlex.quote(','.join(names))}"


def resolve(targets: list[Node], choice: Selection) -> list[Node]:
    """The targets under a choice: its `until` steps, its `only` steps, or the experiment's."""
    names = choice.until or choice.only
    return [n for name in names for n in pick(topological(targets), name)] if names else targets


def required(
    targets: list[Node],
    order: list[Node],
    seen: GraphState,
    forced: Collection[str],
    only: Collection[str],
) -> set[str]:
    """Keys of what a run must execute; `forced` and `only` are keys too, `only` empty for all."""
    stale = [n for n in order if n.key in seen.stale and (not only or n.key in only)]
    needed = needed_keys([*targets, *stale], {key for key in seen.found if key not in forced})
    needed |= {*forced}
    for node in order:
        if node.key in forced:
            needed |= needed_keys(node.inputs.values(), seen.found)
    return needed


def missing_inputs(only: tuple[str, ...], labels: Iterable[str]) -> str:
    """Why a run of `only` some steps is refused that need others, of these labels."""
    return (
        f"--only {shlex.join(only)}: missing inputs: {', '.join(labels)}; use --until to build "
        "them too"
    )


def decide(
    targets: list[Node], order: list[Node], seen: GraphState, choice: Selection, command: str
) -> list[Node]:
    """The nodes to execute, inputs first: those that the targets lack, and all stale ones.

    Raises `InputError` when `only` leaves out a step whose output is missing and for the output of
    another step of this name, `CorruptOutput` for one that `--force` would replace, and the error
    of a source that cannot be listed.
    """
    forced = {node.key for name in choice.force for node in pick(order, name)}
    chosen = {node.key for name in choice.only for node in pick(order, name)}
    needed = required(targets, order, seen, forced, chosen)
    if missing := [n.label for n in order if choice.only and n.key in needed - chosen]:
        raise InputError(missing_inputs(choice.only, missing))
    if corrupt := needed & seen.corrupt.keys() - forced:
        problems = [problem for key, problem in seen.corrupt.items() if key in corrupt]
        if all("--force" in problem for problem in problems):  # the remedy of `check_files`
            problems.append(f"  retry: {with_force(command, corrupt, order)}")
        raise CorruptOutput("\n".join(problems))
    if foreign := needed & seen.foreign.keys() - forced:
        raise InputError("\n".join(p for key, p in seen.foreign.items() if key in foreign))
    for node in order:
        if node.key in needed and node.key in seen.listings.unreachable:
            raise seen.listings.unreachable[node.key]
    return [node for node in order if node.key in needed]
