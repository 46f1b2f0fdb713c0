"""Publishing an output that refers to another output's files: early cutoff, adoption.

Nothing is copied in one store. The referring manifest, an alias, has the node's own key,
configuration and inputs; its `alias` names the output that owns the files, at the end of any chain
of references. An output of another store is copied first, unless the store is to be linked to it.

Adoption is for a user who knows that an output is right although its key differs, as after a
version that was raised without need; the differences that were ignored are recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pipeline.errors import CorruptOutput, InputError, StorageError, StoreUnavailable
from pipeline.graph.step import Node
from pipeline.graph.step_context import Reference
from pipeline.identity import digests, source_code
from pipeline.identity.listing import Listing
from pipeline.plan.changes import ChangeLog
from pipeline.plan.lineage import users
from pipeline.plan.listings import external_values
from pipeline.plan.state import GraphState
from pipeline.store import integrity, lease, manifest, storage
from pipeline.store.copies import bring_home, is_elsewhere
from pipeline.store.manifest import ADOPTED, SAME_INPUTS, Alias, Manifest
from pipeline.store.outputs import Found, Store, remember


def refer(
    store: Store,
    node: Node,
    inputs: Mapping[str, Found],
    listings: Mapping[str, Listing],
    to: Found,
    kind: str,
    differences: tuple[str, ...] = (),
) -> Found:
    """Publish the output `to` as this node's, unless another process published it meanwhile.

    `inputs` are the node's current ones; some may be missing when adopting, and in the place of
    those that it cannot be used without are those of `to`. `kind` and `differences`: see `Alias`.
    """
    if not store.link:
        to = Found(*bring_home(store.prefix, to.path, to.manifest))
    path = store.path(node)
    theirs = to.manifest
    contents = {name: found.manifest.content for name, found in inputs.items()}
    contents |= {name: listing.digest for name, listing in listings.items()}
    owner, chosen = theirs.key, ""
    if theirs.alias is not None:
        owner, chosen = theirs.alias.key, theirs.alias.input
    record = msgspec.structs.replace(
        theirs,
        key=node.key,
        step=node.step.name,
        version=node.step.version,
        label=node.label,
        config=node.identity.config,
        inputs=_described(path, node, inputs, to),
        sources=manifest.keep_sources(path, listings),
        action=digests.action(node.identity, contents),
        alias=Alias(
            kind, manifest.make_ref(path, theirs.home(to.path)), owner, chosen, differences
        ),
    )
    url = storage.join(path, manifest.NAME)
    if storage.create(url, record.to_bytes()) and not is_elsewhere(store.prefix, to.path):
        # It may have been chosen for deletion before the alias could be seen.
        lease.wait_for_collector(to.path.rpartition("/")[0])
        if manifest.load(to.path) is None:
            storage.delete_tree(url)
            raise StoreUnavailable(f"{to.path}: was deleted while it was being reused; run again")
    published = manifest.load_verified(path, node.key)
    if published is None:
        raise StorageError(f"{path}: its manifest was deleted while it was being published")
    if set(inputs) | set(listings) == set(node.inputs) | set(external_values(node)):
        remember(path, record.action, node.key)
    return Found(path, published)


def _described(
    path: str, node: Node, inputs: Mapping[str, Found], to: Found
) -> dict[str, dict[str, str]]:
    """The inputs of the alias of `to` in `path`; see `refer`."""
    found = manifest.describe_inputs(path, {n: (f.path, f.manifest) for n, f in inputs.items()})
    for name, read in to.manifest.inputs.items():
        if name in node.inputs and name not in inputs and node.output.needs_input(name):
            place = manifest.resolve_ref(to.path, read["directory"])
            found[name] = {**read, "directory": manifest.make_ref(path, place)}
    return found


def refer_to(
    body: Reference, root: str, inputs: dict[str, tuple[str, Manifest]], *, link: bool
) -> tuple[Manifest, Alias]:
    """The output that a body refers to, and the alias of the owner of its files.

    One of another store is copied first, and becomes the input, unless the store is linked to it.
    """
    path, found = body.artifact.path, body.artifact.manifest
    name = next((n for n, (place, _) in inputs.items() if place == path), "")
    if not link:
        path, found = bring_home(root.rpartition("/")[0], path, found)
    if name:
        inputs[name] = (path, found)
    key = found.alias.key if found.alias is not None else found.key
    return found, Alias(body.kind, manifest.make_ref(root, found.home(path)), key, name, ())


@dataclass(frozen=True)
class Adoptable:
    """An output to adopt, and its differences from the step's own output, one line per field."""

    path: str
    manifest: Manifest
    differences: tuple[str, ...]


def choose(store: Store, node: Node, seen: GraphState, source: str | None) -> Adoptable:
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
    return Adoptable(path, theirs, tuple(changes.differences(theirs, node)))


def adopt(store: Store, node: Node, seen: GraphState, source: Adoptable) -> Found:
    """Publish an existing output as the node's, after reading every byte of it."""
    for problem in integrity.problems(source.path, source.manifest):
        raise CorruptOutput(f"{problem}; not adopted")
    inputs = {name: seen.found[n.key] for name, n in node.inputs.items() if n.key in seen.found}
    found = Found(source.path, source.manifest)
    if not store.link and source.manifest.key == node.key:
        found = Found(*bring_home(store.prefix, found.path, found.manifest))
    if found.path == store.path(node):  # of another step of this name, whose key is this one's
        url = storage.join(found.path, manifest.NAME)
        _, version = storage.read_versioned(url)
        defined = {"defined": source_code.definition(node.step.function)}
        mine = msgspec.structs.replace(
            found.manifest, provenance={**found.manifest.provenance, **defined}
        )
        if not storage.replace_if(url, mine.to_bytes(), version):
            raise InputError(f"{found.path}: replaced by another process meanwhile; try again")
        return Found(found.path, mine)
    return refer(store, node, inputs, seen.listings.of(node), found, ADOPTED, source.differences)


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
