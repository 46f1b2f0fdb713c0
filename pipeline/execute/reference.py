"""Publishing an output that refers to another output's files: early cutoff, adoption.

Nothing is copied in one store. The referring manifest, an alias, has the node's own key,
configuration and inputs; its `alias` names the output that owns the files, at the end of any chain
of references. An output of another store is copied first, unless the store is to be linked to it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pipeline.errors import StorageError, StoreUnavailable
from pipeline.graph.step import Node
from pipeline.graph.step_context import Reference
from pipeline.identity import digests
from pipeline.identity.listing import Listing
from pipeline.plan.listings import external_values
from pipeline.store import lease, manifest, storage
from pipeline.store.copies import bring_home, is_elsewhere
from pipeline.store.manifest import Alias, Manifest
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

    `inputs` are the node's current ones; some may be missing when adopting. `kind` and
    `differences`: see `Alias`.
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
        inputs=manifest.describe_inputs(path, {n: (f.path, f.manifest) for n, f in inputs.items()}),
        sources=manifest.keep_sources(path, listings),
        action=digests.action(node.identity, contents),
        alias=Alias(
            kind, manifest.make_ref(path, theirs.home(to.path)), owner, chosen, differences
        ),
    )
    url = storage.join(path, manifest.NAME)
    if storage.create(url, record.to_bytes()) and not is_elsewhere(store.prefix, to.path):
        _withdraw_if_collected(url, to)
    published = manifest.load_verified(path, node.key)
    if published is None:
        raise StorageError(f"{path}: its manifest was deleted while it was being published")
    if set(inputs) | set(listings) == set(node.inputs) | set(external_values(node)):
        remember(path, record.action, node.key)
    return Found(path, published)


def _withdraw_if_collected(url: str, to: Found) -> None:
    """Delete a new alias whose target was chosen for deletion before the alias could be seen."""
    lease.wait_for_collector(to.path.rpartition("/")[0])
    if manifest.load(to.path) is None:
        storage.delete_tree(url)
        raise StoreUnavailable(f"{to.path}: was deleted while it was being reused; run again")


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
