"""What the external arguments of a graph stand for, asked of all their stores at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import InputError, PonenteError, StoreUnavailable
from pipeline.graph.external import External
from pipeline.graph.node import Node
from pipeline.identity.listing import Listing

LISTING_SECONDS = 8.0  # for one location: `plan` answers within 10
_AT_ONCE = 16


@dataclass(frozen=True)
class Listings:
    """What the external arguments of a graph's nodes stand for, by node key.

    Attributes:
        found: listings by argument, of every node whose locations could all be listed.
        unreachable: of every other node, why not.
    """

    found: Mapping[str, Mapping[str, Listing]] = field(default_factory=dict)
    unreachable: Mapping[str, PonenteError] = field(default_factory=dict)

    def of(self, node: Node) -> Mapping[str, Listing]:
        """The node's listings by argument; empty when it has none or one could not be listed."""
        return self.found.get(node.key, {})

    def digests(self, node: Node) -> dict[str, str]:
        """Digest of each of the node's listings, which belong to the contents it is made from."""
        return {name: listing.digest for name, listing in self.of(node).items()}


def list_all(nodes: Iterable[Node], seconds: float = LISTING_SECONDS) -> Listings:
    """The listings of every external argument of `nodes`, all at once and each location once."""
    nodes = [node for node in nodes if external_values(node)]
    asked: dict[tuple[Any, str], Any] = {}
    for node in nodes:
        for name, value in external_values(node).items():
            asked[_question(node, name)] = (node.step.externals[name], value)
    if not asked:
        return Listings()
    with ThreadPoolExecutor(min(_AT_ONCE, len(asked))) as pool:
        tried = pool.map(lambda ask: _try_listing(ask[0], ask[1], seconds), asked.values())
        answers = dict(zip(asked, tried, strict=True))
    found: dict[str, dict[str, Listing]] = {}
    unreachable: dict[str, PonenteError] = {}
    for node in nodes:
        mine = {name: answers[_question(node, name)] for name in external_values(node)}
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
    """The node's external arguments that were given."""
    values = {name: node.config[name] for name in node.step.externals}
    return {name: value for name, value in values.items() if value is not None}


def _question(node: Node, name: str) -> tuple[Any, str]:
    return node.step.externals[name].list, repr(node.config[name])


def _try_listing(external: External, value: Any, seconds: float) -> Any:
    """A `Listing`, or why there is none."""
    try:
        return external.list(value, seconds)
    except (PonenteError, OSError) as error:
        return error
