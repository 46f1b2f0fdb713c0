"""Publishing an output that refers to another output's files: early cutoff, adoption.

Nothing is copied. The referring manifest has the node's own key, configuration and inputs; its
`origin` names the output that owns the files, at the end of any chain of references.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from pipeline.errors import StorageError
from pipeline.graph.node import Node
from pipeline.graph.step_context import Reference
from pipeline.identity import digests
from pipeline.identity.listing import Listing
from pipeline.plan.listings import external_values
from pipeline.store import manifest, storage
from pipeline.store.manifest import Manifest, Origin
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

    Args:
        store: the store to publish in.
        node: the node whose output it becomes.
        inputs: the node's current inputs by name; may lack some when adopting.
        listings: current listings of the node's sources, by argument.
        to: the output whose files are referred to.
        kind: why, see `Origin`.
        differences: the differences that an adoption ignores.
    """
    path = store.path(node)
    theirs = to.manifest
    contents = {name: found.manifest.content for name, found in inputs.items()}
    contents |= {name: listing.digest for name, listing in listings.items()}
    owner, chosen = theirs.key, ""
    if theirs.origin is not None:
        owner, chosen = theirs.origin.key, theirs.origin.input
    record = dataclasses.replace(
        theirs,
        key=node.key,
        step=node.step.name,
        version=node.step.version,
        label=node.label,
        config=node.identity.config,
        inputs=manifest.describe_inputs(path, {n: (f.path, f.manifest) for n, f in inputs.items()}),
        sources=manifest.keep_sources(path, listings),
        recipe=digests.recipe(node.identity, contents),
        origin=Origin(
            kind, manifest.make_ref(path, theirs.home(to.path)), owner, chosen, differences
        ),
    )
    storage.create(storage.join(path, manifest.NAME), record.to_bytes())
    published = manifest.load_verified(path, node.key)
    if published is None:
        raise StorageError(f"{path}: its manifest was deleted while it was being published")
    if set(inputs) | set(listings) == set(node.inputs) | set(external_values(node)):
        remember(path, record.recipe, node.key)
    return Found(path, published)


def refer_to(body: Reference, root: str, inputs: Mapping[str, tuple[str, Manifest]]) -> Origin:
    """The origin of a body's reference: the output that owns the files, at the end of any chain."""
    artifact = body.artifact
    origin = artifact.manifest.origin
    key = origin.key if origin is not None else artifact.manifest.key
    name = next((n for n, (path, _) in inputs.items() if path == artifact.path), "")
    return Origin(body.kind, manifest.make_ref(root, artifact.home), key, name)
