"""Adoption: use an existing output as the output of a step although its key differs.

For cases where the user knows that the output is right: a version raised without need, a field
added that keeps the old behaviour. The adopted manifest refers to the existing files and records
the differences that were ignored. Steps that depend on it are reused too, by content.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pipeline.errors import CorruptOutput, InputError
from pipeline.execute.reference import refer
from pipeline.graph.step import Node
from pipeline.identity import source_code
from pipeline.plan.changes import ChangeLog
from pipeline.plan.lineage import users
from pipeline.plan.state import GraphState
from pipeline.store import integrity, manifest, storage
from pipeline.store.copies import bring_home
from pipeline.store.manifest import ADOPTED, SAME_INPUTS, Manifest
from pipeline.store.outputs import Found, Store


@dataclass(frozen=True)
class Candidate:
    """An output to adopt, and its differences from the step's own output, one line per field."""

    path: str
    manifest: Manifest
    differences: tuple[str, ...]


def choose(store: Store, node: Node, seen: GraphState, source: str | None) -> Candidate:
    """The output to adopt: the one in `source`, a name in the store or a URL, or the nearest."""
    if node.key in seen.found and node.key not in seen.same:
        raise InputError(f"{node.label}: already published: {seen.found[node.key].path}")
    changes = ChangeLog(store)
    if node.key in seen.foreign and source is None:
        found = store.find(node)
        source = found.path if found is not None else None
    directory = source or changes.explain(node)[0]
    if not directory:
        raise InputError(f"{node.label}: no earlier output in {store.prefix}; pass --from DIR")
    path = (
        storage.normalise(directory) if "/" in directory else storage.join(store.prefix, directory)
    )
    theirs = manifest.load(path)
    if theirs is None:
        raise InputError(f"{path}: nothing was published there; pass --from DIR of an output")
    if theirs.step != node.step.name:
        raise InputError(f"{path}: an output of {theirs.step}, expected one of {node.step.name}")
    return Candidate(path, theirs, tuple(changes.differences(theirs, node)))


def adopt(store: Store, node: Node, seen: GraphState, source: Candidate) -> Found:
    """Publish an existing output as the node's, after reading every byte of it."""
    for problem in integrity.problems(source.path, source.manifest):
        raise CorruptOutput(f"{problem}; not adopted")
    inputs = {name: seen.found[n.key] for name, n in node.inputs.items() if n.key in seen.found}
    found = Found(source.path, source.manifest)
    if not store.link and source.manifest.key == node.key:
        found = Found(*bring_home(store.prefix, found.path, found.manifest))
    if found.path == store.path(node):
        return _make_own(node, found)
    return refer(store, node, inputs, seen.listings.of(node), found, ADOPTED, source.differences)


def _make_own(node: Node, found: Found) -> Found:
    """The output of another step of this name as the output of this step, which is its key's."""
    url = storage.join(found.path, manifest.NAME)
    _, version = storage.read_versioned(url)
    defined = {"defined": source_code.definition(node.step.function)}
    theirs = found.manifest
    mine = msgspec.structs.replace(theirs, provenance={**theirs.provenance, **defined})
    if not storage.replace_if(url, mine.to_bytes(), version):
        raise InputError(f"{found.path}: replaced by another process meanwhile; try again")
    return Found(found.path, mine)


def undo(store: Store, node: Node) -> tuple[list[str], list[str]]:
    """Remove an adopted output, and the references that were published because of it."""
    path = store.path(node)
    removed, built, left = [], [], [path]
    while left:
        path = left.pop()
        kinds = (ADOPTED,) if not removed else (ADOPTED, SAME_INPUTS)
        readers = users(store.prefix, store.outputs(), path)
        if _remove(path, kinds):
            removed.append(path)
            left += [storage.join(store.prefix, name) for name in readers]
        elif removed:
            built.append(path)
        else:
            raise InputError(f"{path}: nothing was adopted there; nothing was changed")
    return removed, sorted(set(built) - set(removed))


def _remove(path: str, kinds: tuple[str, ...]) -> bool:
    """Delete the manifest in `path` if it is a reference of one of these kinds."""
    url = storage.join(path, manifest.NAME)
    try:
        _, version = storage.read_versioned(url)
    except FileNotFoundError:
        return False
    found = manifest.load(path)
    if found is None or found.alias is None or found.alias.kind not in kinds:
        return False
    if not storage.replace_if(url, None, version):
        raise InputError(f"{path}: replaced by another process meanwhile; try again")
    return True
