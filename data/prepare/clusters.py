"""Clusters of near-duplicates: the connected components of a graph whose nodes are documents.

A node is a document's place (`place_of`). Any part of the edges can be replaced by its forest
without a change of the components, so parts are reduced one by one and their forests joined; the
result depends neither on the order nor on the division.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from data.select.duplicates import repeated

_ROW_BITS = 32


class Clusters(NamedTuple):
    """The documents that have a near-duplicate."""

    places: np.ndarray  # uint64 [documents], ascending
    roots: np.ndarray  # uint64 [documents]: the lowest place of a document's cluster


def place_of(item: int, rows: np.ndarray) -> np.ndarray:
    """uint64 [documents]: places of documents by their row in an item."""
    return rows.astype(np.uint64) | np.uint64(item << _ROW_BITS)


def item_and_row(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [documents] each: the inverse of `place_of`."""
    rows = places & np.uint64((1 << _ROW_BITS) - 1)
    return (places >> np.uint64(_ROW_BITS)).astype(np.int64), rows.astype(np.int64)


def matches(keys: np.ndarray, places: np.ndarray) -> np.ndarray:
    """uint64 [2, edges]: from the lowest place with a key to every other place with it.

    Of uint64 [documents, words] and uint64 [documents].
    """
    some = repeated(keys[:, 0])
    keys, places = keys[some], places[some]
    order = np.lexsort((places, *keys.T[::-1]))
    keys, places = keys[order], places[order]
    begins = _begins(keys)
    later = begins != np.arange(len(keys))
    return np.stack([places[begins[later]], places[later]])


def _begins(keys: np.ndarray) -> np.ndarray:
    """int64 [rows]: the first row of the run of equal rows in which each is."""
    new = np.ones(len(keys), bool)
    new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    return np.maximum.accumulate(np.where(new, np.arange(len(keys)), 0))


def clusters(edges: np.ndarray) -> Clusters:
    """The connected components of a graph of uint64 [2, edges], in any order and direction."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    places, ends = np.unique(edges, return_inverse=True)
    graph = coo_array(
        (np.ones(edges.shape[1], np.int8), ends.reshape(2, -1)), (len(places), len(places))
    )
    labels = connected_components(graph, directed=False)[1]
    lowest = np.unique(labels, return_index=True)[1]
    return Clusters(places, places[lowest][labels])


def forest(edges: np.ndarray) -> np.ndarray:
    """uint64 [2, edges]: from the root of each cluster to its other documents, by their place."""
    found = clusters(edges)
    others = found.places != found.roots
    return np.stack([found.roots[others], found.places[others]])


def keepers(found: Clusters, ranks: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """int64 [documents]: index of the document that is kept of each document's cluster.

    It is the one of the lowest rank (of its split), then of the smallest uint64 hash (see
    `data.select.document_hash`), then of the lowest place.
    """
    order = np.lexsort((found.places, hashes, ranks, found.roots))
    kept = np.empty(len(order), np.int64)
    kept[order] = order[_begins(found.roots[order, None])]
    return kept
