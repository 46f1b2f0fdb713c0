"""Clusters are those of a union-find over all edges, whatever their order and division."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.prepare.clusters import clusters, forest, item_and_row, keepers, matches, place_of

NODES = st.integers(0, 14)
EDGES = st.lists(st.tuples(NODES, NODES), max_size=30)


def by_hand(edges):
    """Sets of connected nodes, joined edge by edge."""
    found = []
    for one, other in edges:
        touched = [cluster for cluster in found if one in cluster or other in cluster]
        found = [cluster for cluster in found if cluster not in touched]
        found.append(set().union({one, other}, *touched))
    return sorted(sorted(cluster) for cluster in found)


def as_array(edges):
    return np.array(edges, np.uint64).reshape(-1, 2).T


def grouped(found):
    sets = {}
    for place, root in zip(found.places.tolist(), found.roots.tolist(), strict=True):
        sets.setdefault(root, []).append(place)
    assert all(root == min(places) for root, places in sets.items())
    return sorted(sets.values())


@given(edges=EDGES)
def test_clusters_are_those_of_a_loop(edges):
    assert grouped(clusters(as_array(edges))) == by_hand(edges)


@given(edges=EDGES, data=st.data())
def test_forests_of_any_parts_in_any_order_have_the_same_forest(edges, data):
    """Parts are replaced by their forests, and these in turn, without a change of the last one."""
    order = data.draw(st.permutations(edges))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(edges)), max_size=4)))
    parts = [order[i:j] for i, j in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    flipped = as_array([(b, a) if data.draw(st.booleans()) else (a, b) for a, b in parts[0]])
    reduced = [forest(flipped), *(forest(as_array(part)) for part in parts[1:])]
    whole = forest(as_array(edges))
    assert np.array_equal(forest(np.concatenate(reduced, axis=1)), whole)
    loops = sum(len(cluster) - 1 for cluster in by_hand(edges))
    assert whole.shape == (2, loops)  # one edge fewer than nodes: no edge is superfluous


@given(
    keys=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=20),
    seed=st.integers(0, 9),
)
def test_matches_connect_equal_keys_and_no_others(keys, seed):
    places = np.random.default_rng(seed).permutation(len(keys)).astype(np.uint64)
    edges = matches(np.array(keys, np.uint64).reshape(-1, 2), places)
    expected = {}
    for key, place in zip(keys, places.tolist(), strict=True):
        expected.setdefault(key, []).append(place)
    groups = [sorted(group) for group in expected.values() if len(group) > 1]
    assert sorted(map(tuple, edges.T.tolist())) == sorted(
        (group[0], other) for group in groups for other in group[1:]
    )


@given(edges=EDGES, seed=st.integers(0, 9))
def test_the_keeper_is_the_least_by_rank_hash_and_place(edges, seed):
    found = clusters(as_array(edges))
    numbers = np.random.default_rng(seed)
    ranks = numbers.integers(0, 3, len(found.places))
    hashes = numbers.integers(0, 4, len(found.places)).astype(np.uint64)
    kept = keepers(found, ranks, hashes)
    at = {place: i for i, place in enumerate(found.places.tolist())}
    for cluster in by_hand(edges):
        best = min(cluster, key=lambda place: (ranks[at[place]], hashes[at[place]], place))
        assert {int(found.places[kept[at[place]]]) for place in cluster} == {best}


def test_places_are_items_and_rows():
    places = place_of(7, np.array([0, 5, (1 << 32) - 1]))
    items, rows = item_and_row(places)
    assert items.tolist() == [7, 7, 7]
    assert rows.tolist() == [0, 5, (1 << 32) - 1]
