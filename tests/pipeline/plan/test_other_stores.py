"""Outputs of other stores: what an output of this one needs of them is copied, or refused."""

from __future__ import annotations

import json
import shutil

import pytest

from pipeline import Experiment, Result, StepContext, step
from pipeline.errors import CorruptOutput
from pipeline.execute.reference import adopt, choose, undo
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.plan.state import read_state
from pipeline.store import copies, integrity, storage
from pipeline.store.copies import bring_home
from pipeline.store.garbage import delete, find_garbage
from pipeline.store.manifest import OUTPUT, load
from pipeline.store.outputs import Store
from pipeline.store.shards import ShardTable
from pipeline.sweep import select
from tests.pipeline.helpers import (
    bring_up,
    check_invariants,
    executed,
    manifest_of,
    path_of,
    result,
)
from tests.pipeline.toy import Numbers, Order, Total, clamp, numbers, opened, order, total

PROVENANCE = "copied_from"


@pytest.fixture
def stores(tmp_path) -> tuple[str, str]:
    return str(tmp_path / "team"), str(tmp_path / "own")


def _cut(limit: int = 100):
    return clamp(numbers(count=10), limit=limit)


def _found(store: str, wanted):
    path = path_of(store, wanted)
    found = load(path)
    assert found is not None, path
    return path, found


def _leave(stores: tuple[str, str], *wanted) -> None:
    """Delete the team's store; one's own must be whole, and says nothing of the other's files."""
    team, own = stores
    shutil.rmtree(team)
    for node in wanted:
        assert executed(own, node, only=(as_node(node).directory,)) == []
        path, found = _found(own, node)
        assert found.home(path).startswith(own)
        assert list(integrity.problems(path, found)) == []
    check_invariants(own)


@pytest.mark.slow
def test_an_output_that_is_reused_by_content_is_copied(stores):
    """Early cutoff across stores; the copy is an output of its own, with its original's key."""
    team, own = stores
    bring_up(team, total(_cut()), _cut())
    wanted = clamp(_cut(200), limit=50)
    bring_up(team, clamp(_cut(), limit=50))
    assert executed(own, wanted, shared=(team,)) == ["clamp"]
    path, found = _found(own, wanted)
    copy, original = _found(own, clamp(_cut(), limit=50))
    assert found.home(path) == copy
    assert original.provenance[PROVENANCE].startswith(team)
    assert original.content == _found(team, clamp(_cut(), limit=50))[1].content
    _leave(stores, wanted)
    delete(Store(own), find_garbage(Store(own), topological([as_node(wanted)])).garbage)
    assert executed(own, wanted, only=("clamp",)) == []


def test_what_an_output_opens_is_copied_and_other_inputs_are_not(stores):
    """An order opens its numbers. Those were clamped from others, which nothing needs."""
    team, own = stores
    bring_up(team, _cut())
    wanted = opened(order(_cut()))
    assert executed(own, wanted, shared=(team,)) == ["order", "opened"]
    names = Store(own).outputs()
    assert as_node(_cut()).directory in names
    assert as_node(numbers(count=10)).directory not in names
    _leave(stores, order(_cut()))
    assert sum(Order(*_found(own, order(_cut()))).input("numbers", Numbers).values()) == 45


def test_what_is_needed_of_a_needed_input_is_copied_too(stores):
    """A selection of the team's opens what its winner opens."""
    team, own = stores
    few = order(numbers(count=4))
    best = select((few, order(_cut())), by="count", mode="max")
    bring_up(team, best)
    node = as_node(best)
    path, found = bring_home(own, *_found(team, best))
    assert path == storage.join(own, node.directory)
    assert as_node(few).directory not in Store(own).outputs()
    _leave(stores, best)
    assert sum(Order(path, found).input("numbers", Numbers).values()) == 45


def test_the_candidate_that_a_selection_chooses_is_copied(stores):
    """With what it needs; the others stay where they are."""
    team, own = stores
    candidates = (order(numbers(count=4)), order(_cut()))
    bring_up(team, *candidates)
    best = select(candidates, by="count", mode="max")
    assert executed(own, opened(best), shared=(team,)) == ["select", "opened"]
    assert as_node(candidates[0]).directory not in Store(own).outputs()
    _leave(stores, best)
    assert result(own, opened(best))["total"] == 45


def test_an_output_adopted_from_another_store_is_copied(stores):
    team, own = stores
    bring_up(team, _cut())
    node, store = as_node(_cut(7)), Store(own)
    source = choose(store, node, read_state(topological([node]), store), _found(team, _cut())[0])
    found = adopt(store, node, read_state(topological([node]), store), source)
    assert found.manifest.alias.differences == ("limit: 100 -> 7",)
    assert found.manifest.alias.directory == as_node(_cut()).directory
    _leave(stores, node)
    assert undo(store, node)[0] == [found.path]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cutoff", "adopt", "select", "opens"])
def test_a_store_refers_to_another_one_when_it_is_asked_to(stores, how):
    """Nothing is copied; and what was published so is readable without the flag."""
    team, own = stores
    bring_up(team, clamp(_cut(), limit=50), order(_cut()))
    store = Store(own, (team,), link=True)
    wanted = {
        "cutoff": clamp(_cut(200), limit=50),
        "adopt": _cut(7),
        "select": select((order(_cut()),), by="count"),
        "opens": opened(order(_cut())),
    }[how]
    node = as_node(wanted)
    if how == "adopt":
        seen = read_state(topological([node]), store)
        adopt(store, node, seen, choose(store, node, seen, _found(team, _cut())[0]))
    else:

        def graph(count: int = 0):
            return wanted

        Experiment(graph).run(prefix=own, shared=(team,), link=True, executor="inline")
    assert PROVENANCE not in str([_found(own, w)[1].provenance for w in (wanted,)])
    assert {name.rpartition("-")[0] for name in Store(own).outputs()} <= {
        node.step.name,
        "clamp",
        "numbers",
    }
    path, found = _found(own, wanted)
    if how != "opens":
        assert found.home(path).startswith(team)
    assert executed(own, wanted, shared=(team,)) == []


@pytest.mark.slow
def test_a_copy_that_was_killed_goes_on_where_it_ended(stores, monkeypatch):
    """Shards that were copied and recorded are not copied again; of many, too."""
    team, own = stores
    wanted = numbers(count=100, shards=100)
    bring_up(team, wanted)
    assert isinstance(_found(team, wanted)[1].shards, ShardTable)
    true, calls = copies._copy_file, []

    def copied(source, target, file):
        calls.append(source)
        if len(calls) == 70:
            raise KeyboardInterrupt
        true(source, target, file)

    monkeypatch.setattr(copies, "_copy_file", copied)
    with pytest.raises(KeyboardInterrupt):
        bring_home(own, *_found(team, wanted))
    assert manifest_of(own, wanted) is None
    bring_home(own, *_found(team, wanted))
    assert len(calls) == 101
    _leave(stores, wanted)


@pytest.mark.parametrize("kind", ["changed", "gone", "of an input"])
def test_a_damaged_original_is_not_copied(stores, kind):
    """Nothing is published, and the message names the file."""
    team, own = stores
    wanted = order(_cut()) if kind == "of an input" else _cut()
    bring_up(team, wanted)
    path, found = _found(team, _cut())
    url = storage.join(path, found.shards[0].root, "n.txt")
    if kind == "gone":
        storage.delete_tree(url)
    else:
        storage.write_atomic(url, storage.read_bytes(url)[::-1])
    with pytest.raises(CorruptOutput, match=r"n\.txt"):
        bring_home(own, *_found(team, wanted))
    assert manifest_of(own, wanted) is None


@step(output=Total, version=1)
def paged(run: StepContext, numbers: Numbers) -> Result:
    with run.shard("page") as directory:
        storage.write_atomic(storage.join(directory, "index.html"), b"page")
    return {"headline": [f"page: {OUTPUT}{directory.removeprefix(run.root)}/index.html"]}


def test_the_lines_that_a_copy_shows_name_its_own_files(stores):
    team, own = stores
    bring_up(team, paged(numbers(count=4)))
    path, found = bring_home(own, *_found(team, paged(numbers(count=4))))
    (line,) = found.result["headline"]
    page = line.removeprefix("page: ").replace(OUTPUT, path)
    assert storage.read_bytes(page) == b"page"


def test_an_old_output_brings_all_of_its_inputs_that_are_there(stores):
    team, own = stores
    bring_up(team, order(_cut()))
    for wanted in (order(_cut()), _cut()):
        url = f"{_found(team, wanted)[0]}/manifest.json"
        tree = json.loads(storage.read_bytes(url))
        del tree["needs"]
        storage.write_atomic(url, json.dumps(tree).encode())
    shutil.rmtree(_found(team, numbers(count=10))[0])
    bring_home(own, *_found(team, order(_cut())))
    _leave(stores, order(_cut()))
    assert sum(Order(*_found(own, order(_cut()))).input("numbers", Numbers).values()) == 45
