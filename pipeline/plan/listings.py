"""Listing the external arguments of a graph, and again those of a step while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import InputError, PonenteError, StoreUnavailable
from pipeline.graph.step import Node, StepSpec
from pipeline.identity.listing import External, Listing, difference

LISTING_SECONDS = 8.0  # deadline for one location, so that `plan` ends within 10 seconds
CHECK_SECONDS = 60.0  # timeout of listing a location again before and after a step's body
_AT_ONCE = 16


@dataclass(frozen=True)
class Listings:
    """The listings of the external arguments of a graph's nodes, by node key.

    A node of which a location could not be listed is in `unreachable`, with the error.
    """

    found: Mapping[str, Mapping[str, Listing]] = field(default_factory=dict)
    unreachable: Mapping[str, PonenteError] = field(default_factory=dict)

    def of(self, node: Node) -> Mapping[str, Listing]:
        return self.found.get(node.key, {})

    def digests(self, node: Node) -> dict[str, str]:
        """Digest of each of the node's listings, by argument; part of its action digest."""
        return {name: listing.digest for name, listing in self.of(node).items()}


def list_all(nodes: Iterable[Node], seconds: float = LISTING_SECONDS) -> Listings:
    """The listings of all external arguments; lists each location once, concurrently."""
    nodes = [node for node in nodes if external_values(node)]
    locations = {
        _location(node, name): (node.step.signature.externals[name], value)
        for node in nodes
        for name, value in external_values(node).items()
    }
    if not locations:
        return Listings()

    def ask(location: tuple[External, Any]) -> Listing | Exception:
        try:
            return location[0].list(location[1], seconds)
        except (PonenteError, OSError) as error:
            return error

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers: dict = dict(zip(locations, pool.map(ask, locations.values()), strict=True))
    found: dict[str, dict[str, Listing]] = {}
    unreachable: dict[str, PonenteError] = {}
    for node in nodes:
        mine = {name: answers[_location(node, name)] for name in external_values(node)}
        errors = [answer for answer in mine.values() if isinstance(answer, Exception)]
        if errors:
            refused = isinstance(errors[0], InputError | FileNotFoundError)
            kind = InputError if refused else StoreUnavailable
            cause = " ".join(str(errors[0]).split())
            unreachable[node.key] = kind(f"{node.label}: {cause}")
        else:
            found[node.key] = mine
    return Listings(found, unreachable)


def external_values(node: Node) -> dict[str, Any]:
    """Values of the node's external arguments, without those that are None."""
    values = {name: node.config.get(name) for name in node.step.signature.externals}
    return {name: value for name, value in values.items() if value is not None}


def _location(node: Node, name: str) -> tuple[Any, str]:
    return node.step.signature.externals[name].list, repr(node.config[name])


def check_unchanged(
    label: str,
    step: StepSpec[..., Any],
    arguments: Mapping[str, Any],
    planned: Mapping[str, Listing],
) -> None:
    """Refuse external arguments whose listing changed since the run was planned.

    Raises `StorageError` where one cannot be listed.
    """
    for name, listing in planned.items():
        if listing.pinned:
            continue
        now = step.signature.externals[name].list(arguments[name], CHECK_SECONDS)
        if now.digest != listing.digest and not now.same_as(listing.files):
            changes = difference(listing.summary, listing.files, now)
            raise InputError(
                f"{label}({name}=...): expected the files that the run was planned with, found "
                f"{changes}; run again to use the current files, and do not change them meanwhile"
            )
