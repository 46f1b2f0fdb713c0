"""Whether a run fits this process, without Ray, and whether its hardware exceeds one machine.

A small run ends in less time than Ray needs to start.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.errors import InputError
from pipeline.graph.hardware import Hardware
from pipeline.graph.step import Node
from pipeline.plan.listings import Listings, external_values

_SOURCE_BYTES = 64 * 2**20  # one core tokenises them in about ten seconds


def why_small(order: Iterable[Node], needed: Iterable[Node], listings: Listings) -> str:
    """Why the needed steps can run in this process, for display; empty if they need Ray.

    The work of a fan-out grows with the sources of the graph, so those must be known and small; a
    graph of steps that read none is small.
    """
    if not all(_alone(node) for node in needed):
        return ""
    order, sources = list(order), {}
    for node in order:
        found = listings.of(node)
        if found.keys() != external_values(node).keys():
            return ""
        sources |= {listing.where: listing.most_bytes for listing in found.values()}
    sizes = [size for size in sources.values() if size is not None]
    reads = any(node.step.signature.externals for node in order)
    if (reads and not sizes) or len(sizes) < len(sources) or sum(sizes) > _SOURCE_BYTES:
        return ""
    most = f"sources of at most {max(1, round(sum(sizes) / 1e6))} MB" if sizes else "no sources"
    return f"{most}, local hardware"


def _alone(node: Node) -> bool:
    """Whether a step can run in this process while no other step runs."""
    wants = node.step.resources
    elsewhere = any(place.kind != "local" for place in _places(node))
    return not (node.live or wants.custom or wants.memory or elsewhere)


def _places(node: Node) -> list[Hardware]:
    return [value for value in node.runtime.values() if isinstance(value, Hardware)]


def refuse_several_hosts(needed: Iterable[Node]) -> None:
    """Raise `InputError` for hardware of several hosts; to be called when there is no cluster."""
    for node in needed:
        for place in _places(node):
            if place.kind in ("tpu", "gpu") and place.processes > 1:
                raise InputError(
                    f"{node.label}: hardware {place.name!r} has {place.processes} hosts, and this "
                    "run has joined no Ray cluster: start it on one with --cluster auto, or choose "
                    "hardware of one host"
                )
