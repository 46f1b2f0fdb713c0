"""What a selection opens: the inputs of the candidate it chose, as that candidate would."""

from __future__ import annotations

import shutil

import pytest

from pipeline.errors import CorruptOutput
from pipeline.execute.reference import adopt, choose
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.plan.lineage import lineage
from pipeline.plan.state import pick, read_state
from pipeline.store import storage
from pipeline.store.garbage import delete, find_garbage
from pipeline.store.outputs import Found, Store
from pipeline.sweep import select, selection, sweep
from tests.pipeline.helpers import bring_up, check_invariants, executed, path_of, result
from tests.pipeline.toy import Numbers, Order, clamp, numbers, opened, opened_many, order, orders

FEW, MANY = sum(range(4)), sum(range(10))


def _clamped(limit):
    return order(clamp(numbers(count=10), limit=limit))


def _largest(*candidates):
    return select(candidates, by="count", mode="max")


def _found(store, wanted) -> Found:
    return bring_up(store, wanted).published[as_node(wanted).key]


def _sum(found: Found) -> int:
    return sum(Order(found.path, found.manifest).input("numbers", Numbers).values())


def test_a_selection_opens_what_its_winner_opens(tmp_path):
    """Not what another candidate does; through a selection among selections too."""
    store, few = str(tmp_path), order(numbers(count=4))
    best = _largest(few, _clamped(100))
    bring_up(store, opened(best), opened(_largest(best, few)), opened(_largest(few)))
    assert result(store, opened(best))["total"] == MANY
    assert result(store, opened(_largest(best, few)))["total"] == MANY
    assert result(store, opened(_largest(few)))["total"] == FEW


def test_a_selection_opens_a_tuple_of_inputs(tmp_path):
    """As many as the winner read, in their order, however many candidates there were."""
    store = str(tmp_path)
    candidates = [orders([numbers(count=n) for n in counts]) for counts in ((2,), (10, 4), (6,))]
    wanted = opened_many(_largest(*candidates))
    bring_up(store, wanted)
    assert result(store, wanted)["totals"] == [MANY, FEW]


def test_selections_are_as_different_as_what_their_winners_open(tmp_path):
    """Both winners say the same of as many numbers, and yet what reads through them differs."""
    store = str(tmp_path)
    bring_up(store, opened(_largest(_clamped(100))))
    other = opened(_largest(_clamped(5)))
    assert executed(store, other) == ["clamp", "order", "select", "opened"]
    assert result(store, other)["total"] == sum(min(n, 5) for n in range(10))


def test_a_selection_that_is_reused_by_content_opens_its_own_winners_inputs(tmp_path):
    """What the selection it refers to was made from may be deleted."""
    store = str(tmp_path)
    bring_up(store, opened(_largest(_clamped(100))))
    again = _largest(_clamped(200))
    assert executed(store, opened(again)) == ["clamp"]
    graph = topological([as_node(again)])
    delete(Store(store), find_garbage(Store(store), graph).garbage)
    assert not storage.exists(path_of(store, _largest(_clamped(100))))
    found = _found(store, again)
    assert found.manifest.alias is not None
    assert found.manifest.alias.kind == "same inputs"
    assert _sum(found) == MANY
    assert find_garbage(Store(store), graph).garbage == []
    check_invariants(store)


def test_a_selection_keeps_its_winner_and_what_that_was_made_from(tmp_path):
    """It is in its lineage, and collecting garbage leaves it."""
    store, best = str(tmp_path), _largest(order(numbers(count=4)), _clamped(100))
    found = _found(store, best)
    graph = topological([as_node(best)])
    ancestors = [ancestor.path for ancestor in lineage([found.path])]
    assert sorted(ancestors) == sorted(storage.join(store, node.directory) for node in graph)
    assert find_garbage(Store(store), graph).garbage == []


def test_an_adopted_selection_opens_what_it_stands_for(tmp_path):
    """Also where the candidates it is said to choose from were never built."""
    store = Store(str(tmp_path))
    source = _found(store.prefix, _largest(_clamped(100)))
    node = as_node(_largest(_clamped(7)))
    seen = read_state(topological([node]), store)
    found = adopt(store, node, seen, choose(store, node, seen, source.path))
    assert found.manifest.inputs == {}
    assert _sum(found) == MANY


def test_a_winner_that_is_gone_is_named(tmp_path):
    store, winner = str(tmp_path), _clamped(100)
    found = _found(store, _largest(winner))
    shutil.rmtree(path_of(store, winner))
    with pytest.raises(CorruptOutput, match=r"order-.*: input candidates\[0\] .* is missing"):
        _sum(found)


def test_a_steps_name_means_its_candidates_and_no_step_of_a_longer_name():
    """`order` is no label here, but the step of both candidates; `ord` begins three names."""
    first = numbers(count=1)
    both = sweep(lambda n: order(numbers(count=n)), [2, 3])
    nodes = topological([as_node(each) for each in (*both, orders((first,)))])
    assert [node.label for node in pick(nodes, "order")] == ["order[2]", "order[3]"]
    assert len(pick(nodes, "ord")) == 3
    assert [node.step.name for node in pick(nodes, "orders")] == ["orders"]


def test_the_candidates_class_says_how_certain_the_choice_is(tmp_path, monkeypatch):
    """With the opened candidates, the path and the choice; the class is no part of the key."""
    seen = []

    def compared(cls, candidates, by, best):
        seen.append((cls, {type(each) for each in candidates}, by, best))
        return [{"rank": number} for number, _ in enumerate(candidates)], "by chance"

    candidates = order(numbers(count=4)), order(numbers(count=10))
    key = as_node(_largest(*candidates)).key
    monkeypatch.setattr(Order, "compared", classmethod(compared))
    found = _found(str(tmp_path), _largest(*candidates)).manifest
    assert seen == [(Order, {Order}, "count", 1)]
    assert [row["rank"] for row in found.result["measured"]["candidates"]] == [0, 1]
    assert found.result["headline"][0].endswith("(10); by chance")
    assert found.key == key == as_node(selection(candidates, by="count", mode="max")).key
