"""Adoption: an output that is there, declared to be what a step would build.

For when the code says the key is another but a person knows the output is right: a renamed module,
a version raised for no reason, a field added with the meaning it always had. The adopted manifest
refers to the other's files and says so. What depends on it is reused too, by content.
"""

from __future__ import annotations

from pipeline.errors import CorruptOutput, InputError
from pipeline.execute.reference import refer
from pipeline.graph.node import Node
from pipeline.plan.changes import ChangeLog
from pipeline.plan.state import GraphState
from pipeline.store import integrity, manifest, storage
from pipeline.store.outputs import Found, Store


def adopt(
    store: Store, node: Node, seen: GraphState, source: str | None
) -> tuple[Found, list[str]]:
    """Publish an existing output as the node's.

    Args:
        store: where the node's output is missing.
        node: the step to adopt for.
        seen: what is there of the graph.
        source: directory of the output, a name in the store or a URL; None for the nearest earlier.

    Returns:
        what is now published, and the field-level differences that were passed over.

    Raises:
        InputError: when there is nothing to adopt, or it is another step's.
        CorruptOutput: when its bytes are not what was recorded.
    """
    if node.key in seen.found and node.key not in seen.same:
        raise InputError(f"{node.label}: already there: {seen.found[node.key].path}")
    reasons = ChangeLog(store)
    directory = source or reasons.explain(node)[0]
    if not directory:
        raise InputError(f"{node.label}: no earlier output in {store.prefix}; say --from DIR")
    path = (
        storage.normalise(directory) if "/" in directory else storage.join(store.prefix, directory)
    )
    theirs = manifest.load(path)
    if theirs is None:
        raise InputError(f"{path}: nothing was published there; say --from DIR of an output")
    if theirs.step != node.step.name:
        raise InputError(f"{path}: an output of {theirs.step}, expected one of {node.step.name}")
    for problem in integrity.damage(path, theirs):
        raise CorruptOutput(f"{problem}; not adopted")
    inputs = {name: seen.found[n.key] for name, n in node.inputs.items() if n.key in seen.found}
    passed_over = reasons.differences(theirs, node)
    found = refer(store, node, inputs, seen.listings.of(node), Found(path, theirs), "adopted")
    return found, passed_over
