"""Adoption: an existing output, declared to be what a step would build.

For when the key differs but a person knows the output is right: a version raised for no reason, a
field added with the meaning it always had. The adopted manifest refers to the other's files and
records the differences that were ignored. What depends on it is reused too, by content.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import CorruptOutput, InputError
from pipeline.execute.reference import refer
from pipeline.graph.node import Node
from pipeline.plan.changes import ChangeLog
from pipeline.plan.state import GraphState
from pipeline.store import integrity, manifest, storage
from pipeline.store.manifest import ADOPTED, Manifest
from pipeline.store.outputs import Found, Store


@dataclass(frozen=True)
class Candidate:
    """An output to adopt, and its differences to what the step would build, a line a field."""

    path: str
    manifest: Manifest
    differences: tuple[str, ...]


def choose(store: Store, node: Node, seen: GraphState, source: str | None) -> Candidate:
    """The output to adopt.

    Args:
        store: where the node's output is missing.
        node: the step to adopt for.
        seen: what is there of the graph.
        source: directory of the output, a name in the store or a URL; None for the nearest earlier.

    Raises:
        InputError: when there is nothing to adopt, or it is another step's.
    """
    if node.key in seen.found and node.key not in seen.same:
        raise InputError(f"{node.label}: already published: {seen.found[node.key].path}")
    changes = ChangeLog(store)
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
    """Publish an existing output as the node's, after reading every byte of it.

    Raises:
        CorruptOutput: when its bytes are not what was recorded.
    """
    for problem in integrity.damage(source.path, source.manifest):
        raise CorruptOutput(f"{problem}; not adopted")
    inputs = {name: seen.found[n.key] for name, n in node.inputs.items() if n.key in seen.found}
    found = Found(source.path, source.manifest)
    return refer(store, node, inputs, seen.listings.of(node), found, ADOPTED, source.differences)


def undo(store: Store, node: Node) -> str:
    """Remove an adopted output; returns the directory that its files stay in.

    Raises:
        InputError: when the step's output is not an adopted one, or was replaced meanwhile.
    """
    path = store.path(node)
    url = storage.join(path, manifest.NAME)
    try:
        _, version = storage.read_versioned(url)
    except FileNotFoundError:
        raise InputError(f"{node.label}: nothing is published at {path}") from None
    found = manifest.load(path)
    if found is None or found.origin is None or found.origin.kind != ADOPTED:
        raise InputError(f"{node.label}: the output at {path} was not adopted; nothing was changed")
    if not storage.replace_if(url, None, version):
        raise InputError(f"{path}: replaced by another process meanwhile; nothing was changed")
    return found.home(path)
