"""The licence of a data set, where it enters a graph: for `plan`, a run's first lines and cards."""

from __future__ import annotations

from typing import Any

from data.sources import license_of
from pipeline.graph.facts import Facts, Results
from pipeline.graph.step import Node


def source_license(node: Node, results: Results) -> Facts:
    """The licence of what a step reads as `source` or `documents`, where it is known."""
    del results
    return license_facts(node.config.get("source", node.config.get("documents")))


def license_facts(source: Any) -> Facts:
    """A line and data with the licence of a source; none of one that is not known."""
    found = license_of(source) if isinstance(source, str) else None
    if found is None:
        return Facts()
    repository, license = found
    about = {"source": repository, "name": license.name, "commercial": license.commercial}
    return Facts((f"licence of {repository}: {license}",), {"license": about})
