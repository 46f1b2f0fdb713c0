"""The artifact of a step, after it and all above it were built in this process."""

from __future__ import annotations

from typing import Any, TypeVar

from pipeline.graph.step import as_node
from tests.pipeline.helpers import bring_up

A = TypeVar("A")


def built(store: Any, wanted: Any, kind: type[A], **options: Any) -> A:
    """The artifact `kind` of `wanted` in a store."""
    node = as_node(wanted)
    found = bring_up(str(store), node, **options).published[node.key]
    return kind(found.path, found.manifest)
