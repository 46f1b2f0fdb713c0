"""What is reused and what is built again: early cutoff, rebuilds, shared stores, adoption."""

from __future__ import annotations

import os
import shutil

import pytest

from pipeline.errors import CorruptOutput, InputError, StepFailed
from pipeline.execute.reference import adopt, choose, undo
from pipeline.graph.order import named, topological
from pipeline.graph.step import as_node
from pipeline.plan.plan import plan
from pipeline.plan.state import read_state
from pipeline.store import integrity, storage
from pipeline.store.garbage import delete, find_garbage
from pipeline.store.outputs import Store
from pipeline.sweep import select, sweep
from tests.pipeline.helpers import (
    bring_up,
    check_invariants,
    executed,
    manifest_of,
    path_of,
    result,
)
from tests.pipeline.toy import (
    Numbers,
    Order,
    Scale,
    clamp,
    noise,
    numbers,
    opened,
    opened_many,
    order,
    orders,
    refuse,
    scaled,
    shown,
    total,
)


def _tree(root):
    return {
        os.path.join(at, name): open(os.path.join(at, name), "rb").read()
        for at, _, names in os.walk(root)
        for name in names
        if "events" not in at
    }


def _chain(limit, factor=3):
    """numbers -> clamp -> scaled -> total; a limit above 9 changes nothing in what clamp makes."""
    cut = clamp(numbers(count=10), limit=limit)
    return total(cut, scaled(cut, scale=Scale(factor)))


@pytest.mark.slow
def test_an_input_that_comes_out_the_same_changes_nothing_further_down(tmp_path):
    """clamp runs again under another limit, makes the same, and its users are not run."""
    store = str(tmp_path)
    bring_up(store, _chain(100))
    assert executed(store, _chain(200)) == ["clamp"]
    assert result(store, _chain(200)) == result(store, _chain(100))
    found = manifest_of(store, _chain(200))
    assert found.alias.kind == "same inputs"
    assert found.alias.directory == as_node(_chain(100)).directory
    assert executed(store, _chain(200)) == []
    assert executed(store, _chain(5)) == ["clamp", "scaled", "total"]
    check_invariants(store)


def test_plan_sees_that_contents_are_the_same(tmp_path):
    """Once clamp is there under the new limit, plan says the rest is reused, and from where."""
    store = str(tmp_path)
    bring_up(store, _chain(100))
    bring_up(store, clamp(numbers(count=10), limit=200))
    entries = {e.node.label: e for e in plan([as_node(_chain(200))], Store(store))}
    assert {e.status for e in entries.values()} == {"hit"}
    assert as_node(_chain(100)).directory in entries["total"].reason


@pytest.mark.slow
def test_a_reference_to_a_reference_names_the_owner_of_the_files(tmp_path):
    """A third limit refers to the first output, not to the second's reference."""
    store = str(tmp_path)
    for limit in (100, 200, 300):
        bring_up(store, _chain(limit))
    found = manifest_of(store, _chain(300))
    assert found.alias.directory == as_node(_chain(100)).directory


def test_a_step_that_reads_lineage_runs_again(tmp_path):
    """Its output shows more of its inputs than what they hold."""
    store = str(tmp_path)
    bring_up(store, shown(_chain(100)))
    assert executed(store, shown(_chain(200))) == ["clamp", "shown"]


def test_an_artifact_that_opens_its_inputs_is_as_different_as_they_are(tmp_path):
    """Two orders say the same of as many numbers, and yet what reads through them differs."""
    store = str(tmp_path)
    bring_up(store, opened(order(clamp(numbers(count=10), limit=100))))
    other = opened(order(clamp(numbers(count=10), limit=5)))
    assert executed(store, other) == ["clamp", "order", "opened"]
    assert result(store, other)["total"] == sum(min(n, 5) for n in range(10))


@pytest.mark.slow
def test_an_artifact_opens_a_tuple_of_inputs_in_their_order(tmp_path):
    """Twelve inputs are opened as they were given, and each is part of what the artifact says."""
    store, counts = str(tmp_path), [10, 2, 4, 6, 8, 12, 14, 16, 18, 20, 22, 24]
    parts = [numbers(count=count) for count in counts]
    bring_up(store, opened_many(orders(parts)))
    expected = [sum(range(count)) for count in counts]
    assert result(store, opened_many(orders(parts)))["totals"] == expected
    other = opened_many(orders([*parts[:-1], clamp(parts[-1], limit=1)]))
    assert executed(store, other) == ["clamp", "orders", "opened_many"]
    assert result(store, other)["totals"] == [*expected[:-1], 23]


@pytest.mark.slow
def test_force_builds_again_and_what_depends_on_it_only_if_it_differs(tmp_path):
    """A forced step that makes the same leaves its users alone; one that differs rebuilds them."""
    store = str(tmp_path)
    bring_up(store, _chain(100))
    assert executed(store, _chain(100), force=("clamp",)) == ["clamp"]
    noisy = total(noise(numbers(count=4)))
    bring_up(store, noisy)
    before = result(store, noisy)["total"]
    assert executed(store, noisy, force=("noise",)) == ["noise", "total"]
    assert result(store, noisy)["total"] != before
    assert executed(store, noisy) == []
    check_invariants(store)


def test_the_output_that_was_there_stays_until_a_forced_one_is_finished(tmp_path, monkeypatch):
    """A forced build that fails loses nothing; the replaced data goes only with gc."""
    store = str(tmp_path)
    noisy = noise(numbers(count=4))
    bring_up(store, noisy)
    before = manifest_of(store, noisy)
    monkeypatch.setenv("PONENTE_TOY_FAIL", "noise")
    with pytest.raises(StepFailed):
        bring_up(store, noisy, force=("noise",))
    monkeypatch.delenv("PONENTE_TOY_FAIL")
    assert manifest_of(store, noisy) == before
    assert executed(store, noisy) == []
    bring_up(store, noisy, force=("noise",))
    old = storage.join(store, as_node(noisy).directory, before.shards[0].root, "n.txt")
    assert storage.exists(old)
    garbage = find_garbage(Store(store), topological([as_node(noisy)])).garbage
    delete(Store(store), garbage)
    assert not storage.exists(old)
    check_invariants(store)


def test_a_lost_input_built_again_with_other_content_rebuilds_its_users(tmp_path):
    """The key is the same, but what the user was made from is gone: it is stale, and says so."""
    store = str(tmp_path)
    source = noise(numbers(count=4))
    bring_up(store, total(source))
    shutil.rmtree(path_of(store, source))
    bring_up(store, source)
    entries = {e.node.label: e for e in plan([as_node(total(source))], Store(store))}
    assert entries["total"].status == "stale"
    assert "noise" in entries["total"].reason
    assert executed(store, total(source)) == ["total"]


def test_only_until_and_keep_going(tmp_path):
    """Parts of a graph; a failure stops what needs it and, when asked, nothing else."""
    store = str(tmp_path)
    with pytest.raises(InputError, match="numbers"):
        bring_up(store, _chain(100), only=("clamp",))
    assert executed(store, _chain(100), until=("clamp",)) == ["numbers", "clamp"]
    assert executed(store, _chain(100), only=("scaled",)) == ["scaled"]
    with pytest.raises(InputError, match="expected one of"):
        bring_up(store, _chain(100), until=("nothing",))
    source = numbers(count=6)
    graph = total(source), scaled(source, scale=Scale(2)), named(refuse(source), "refuses")
    with pytest.raises(StepFailed, match="expected something else"):
        bring_up(store, *graph, keep_going=True)
    assert executed(store, total(source), scaled(source, scale=Scale(2))) == []


@pytest.mark.slow
def test_a_shared_store_is_read_and_never_written(tmp_path):
    """Hits come from it with their origin, and what is built here says where its inputs were."""
    team, own = str(tmp_path / "team"), str(tmp_path / "own")
    bring_up(team, _chain(100, factor=2))
    before = _tree(team)
    events = []
    run = bring_up(own, _chain(100), shared=(team,), events=events)
    assert [n.label for n in run.executed] == ["scaled", "total"]
    hits = {e["step"]: e["origin"] for e in events if e["event"] == "hit"}
    assert hits["clamp"].startswith(team)
    assert manifest_of(own, _chain(100)).inputs["left"]["directory"].startswith(team)
    assert executed(own, _chain(200), shared=(team,)) == ["clamp"], "by content, across stores"
    assert _tree(team) == before


def test_damage_in_a_shared_store_is_passed_over(tmp_path):
    """Somebody else's broken output is not used and does not stop a build here."""
    team, own = str(tmp_path / "team"), str(tmp_path / "own")
    found = bring_up(team, numbers(count=4)).published[as_node(numbers(count=4)).key]
    storage.write_atomic(storage.join(found.path, "manifest.json"), b"{")
    assert executed(own, numbers(count=4), shared=(team,)) == ["numbers"]


def test_verify_names_the_bytes_that_are_wrong(tmp_path):
    """One changed byte in the third MiB of a file: that MiB, and no other, is named."""
    directory = str(tmp_path / "attempts" / "1")
    with storage.open_write(f"{directory}/big") as file:
        file.write(os.urandom(4 * 2**20 + 17))
    measured = integrity.measure(directory, "big")
    assert measured.size == 4 * 2**20 + 17
    assert len(measured.blocks) == 8 * 5
    url = f"{directory}/big"
    assert list(integrity._file_problems(url, measured)) == []
    with open(url, "r+b") as file:
        file.seek(2 * 2**20 + 5)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    (line,) = integrity._file_problems(url, measured)
    assert f"bytes {2 * 2**20}-{3 * 2**20 - 1} " in line
    with open(url, "r+b") as file:
        file.truncate(3 * 2**20 + 1)
    lines = list(integrity._file_problems(url, measured))
    assert f"{3 * 2**20 + 1} bytes, expected" in lines[0]
    assert any(f"bytes {2 * 2**20}-{3 * 2**20} " in line for line in lines)


def test_adoption_is_recorded_and_goes_down_the_graph(tmp_path):
    """An output of the same step under an older config is taken, and its users are reused."""
    store = Store(str(tmp_path))
    bring_up(store.prefix, _chain(100))
    cut = clamp(numbers(count=10), limit=7)
    node = as_node(cut)
    found = _adopt(store, node)
    assert found.manifest.alias.kind == "adopted"
    assert found.manifest.alias.differences == ("limit: 100 -> 7",)
    assert executed(store.prefix, _chain(7)) == []
    reason = next(e.reason for e in plan([node], store) if e.node is node)
    assert "adopted" in reason
    assert "ignoring limit: 100 -> 7" in reason
    with pytest.raises(InputError, match="already published"):
        _adopt(store, node)
    other = as_node(scaled(numbers(count=4), scale=Scale(1)))
    with pytest.raises(InputError, match=r"expected one of .*scaled"):
        _adopt(store, other, node.directory)


def test_an_adopted_output_whose_inputs_were_never_built_is_read_with_its_own(tmp_path):
    """It keeps them from deletion, and other inputs that are built later do not make it stale."""
    store = Store(str(tmp_path))
    bring_up(store.prefix, order(clamp(numbers(count=10), limit=100)))
    cut = clamp(numbers(count=10), limit=7)
    node = as_node(order(cut))
    found = _adopt(store, node)
    read = Order(found.path, found.manifest).input("numbers", Numbers).values()
    assert sum(read) == sum(range(10))
    assert find_garbage(store, topological([node])).garbage == []
    bring_up(store.prefix, cut)
    assert plan([node], store)[-1].status == "hit"


def _adopt(store, node, source=None):
    seen = read_state(topological([node]), store)
    return adopt(store, node, seen, choose(store, node, seen, source))


def test_an_adoption_can_be_undone_and_nothing_else_can(tmp_path):
    """Afterwards the step runs again; an output that was built is refused."""
    store = Store(str(tmp_path))
    bring_up(store.prefix, clamp(numbers(count=10), limit=100))
    node = as_node(clamp(numbers(count=10), limit=7))
    _adopt(store, node)
    undo(store, node)
    assert executed(store.prefix, node) == ["clamp"]
    for wanted in (node, as_node(numbers(count=3))):
        with pytest.raises(InputError, match="nothing"):
            undo(store, wanted)


def test_damaged_outputs_are_not_adopted(tmp_path):
    store = Store(str(tmp_path))
    source = bring_up(store.prefix, numbers(count=4)).published[as_node(numbers(count=4)).key]
    url = storage.join(source.path, source.manifest.shards[0].root, "n.txt")
    storage.write_atomic(url, storage.read_bytes(url)[::-1])
    node = as_node(numbers(count=4, shards=1))
    with pytest.raises(CorruptOutput, match=r"n\.txt"):
        _adopt(store, node)


@pytest.mark.slow
def test_a_sweep_builds_each_setting_once_and_selects_the_best(tmp_path):
    """Three settings, then a fourth: one more step runs; the winner's files are referred to."""
    store = str(tmp_path)
    source = numbers(count=4)

    def totals(factors):
        return sweep(lambda f: total(scaled(source, scale=Scale(f))), factors)

    best = select(totals([3, 1, 2]), by="total", mode="max")
    labels = executed(store, best)
    assert labels.count("scaled") == 3
    assert result(store, best)["total"] == 18
    assert result(store, best)["selected"]["index"] == 0
    again = executed(store, select(totals([3, 1, 2, 4]), by="total", mode="max"))
    assert sorted(again) == ["scaled", "select", "total[4]"]
    named_ones = sweep(lambda f: scaled(source, scale=Scale(f)), {"small": 1, "large": 5})
    smallest = total(select(named_ones, by="sum", mode="min"))
    bring_up(store, smallest)
    assert result(store, smallest)["total"] == 6
    with pytest.raises(StepFailed, match="it has total"):
        bring_up(store, select(totals([1, 2]), by="loss"))


def test_a_value_that_a_sweep_has_twice_is_refused():
    """Before anything is built, with the value; two values of one name would be one step."""
    with pytest.raises(InputError, match="1 is given twice"):
        sweep(lambda count: numbers(count=count), [1, 1])
