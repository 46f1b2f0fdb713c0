"""Graphs that are wrong, and graphs that are large: a typed error or a plan, and never a hang."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline import InputError, named, step
from pipeline.errors import CorruptOutput
from pipeline.execute.event_log import EventLog
from pipeline.execute.executor import Execution
from pipeline.graph import order
from pipeline.graph import step as step_module
from pipeline.graph.order import topological, unique_labels
from pipeline.graph.step import as_node
from pipeline.plan import changes
from pipeline.plan.lineage import lineage
from pipeline.plan.plan import plan
from pipeline.plan.state import needed_keys
from pipeline.store import storage
from pipeline.store.outputs import Store
from tests.pipeline.graph.large_graphs import chain, publish, wide_graph
from tests.pipeline.helpers import bring_up, executed, path_of, result
from tests.pipeline.toy import Numbers, Scale, numbers, scaled, total

ROOT = Path(__file__).parents[3]
# The package exports a function of the module's name.


def _ring(length: int) -> list[Any]:
    """`length` nodes in a row, the first of them made to read the last."""
    nodes = [as_node(scaled(numbers(count=2), scale=Scale(0)))]
    for factor in range(1, length):
        nodes.append(as_node(scaled(nodes[-1], scale=Scale(factor))))
    nodes[0].inputs["numbers"] = nodes[-1]
    return nodes


@pytest.mark.parametrize("length", [1, 2, 3, 3000])
@pytest.mark.parametrize("entry", [0, -1])
def test_a_cycle_is_refused(tmp_path, length, entry):
    """From whichever step one enters it, by all three who walk a graph."""
    ring = _ring(length)
    users = [ring[entry], as_node(total(numbers(count=4), ring[entry]))]
    for target in users:
        for walk in (
            lambda t: topological([t]),
            lambda t: plan([t], Store(str(tmp_path))),
            lambda t: Execution([t], Store(str(tmp_path)), EventLog(str(tmp_path), "x", []), ""),
        ):
            with pytest.raises(InputError, match="cannot have a cycle") as caught:
                walk(target)
            assert len(str(caught.value)) < 1000
    assert len(needed_keys([ring[0]], set())) == length
    assert list(tmp_path.iterdir()) == []


def test_the_message_of_a_cycle_names_its_steps_and_no_others():
    ring = [named(node, f"ring {n}") for n, node in enumerate(_ring(3))]
    with pytest.raises(InputError) as caught:
        topological([as_node(total(ring[1]))])
    assert all(f"ring {n}" in str(caught.value) for n in range(3))
    assert "total" not in str(caught.value)


def test_a_diamond_is_executed_once_a_step(tmp_path):
    """Source, two branches and their join; built from separate but equal sources."""
    left = named(scaled(numbers(count=4), scale=Scale(2)), "left")
    right = named(scaled(numbers(count=4), scale=Scale(3)), "right")
    join = total(left, right)
    order = executed(str(tmp_path), join, left)
    assert sorted(order) == ["left", "numbers", "right", "total"]
    assert (order[0], order[-1]) == ("numbers", "total")
    assert result(str(tmp_path), join)["total"] == (0 + 1 + 2 + 3) * 5


def test_two_steps_of_one_name_are_refused():
    """Their keys would be equal and only one of them would run."""

    def one(run):
        return {"is": 1}

    def two(run):
        return {"is": 2}

    first = step(output=Numbers, version=1, name="shared")(one)()
    second = step(output=Numbers, version=1, name="shared")(two)()
    for targets in ([first, second], [as_node(total(first, second))]):
        with pytest.raises(InputError, match="'shared'") as caught:
            topological([as_node(t) for t in targets])
        assert "one" in str(caught.value)
        assert "two" in str(caught.value)
    newer = step(output=Numbers, version=2, name="shared")(two)()
    with pytest.raises(InputError, match=r"two different steps.*@step\(name="):
        topological([as_node(first), as_node(newer)])
    again = step(output=Numbers, version=2, name="shared")(one)()
    assert len(topological([as_node(first), as_node(again)])) == 2


def test_two_keys_that_would_share_a_directory_are_refused(tmp_path, monkeypatch):
    """Where the shown digits of two keys of one step are equal, neither runs."""
    monkeypatch.setattr(step_module, "_KEY_DIGITS", 0)
    pair = [as_node(numbers(count=2)), as_node(numbers(count=4))]
    assert pair[0].directory == pair[1].directory
    for walk in (topological, lambda t: plan(t, Store(str(tmp_path)))):
        with pytest.raises(InputError, match="both write to") as caught:
            walk(pair)
        assert pair[0].key in str(caught.value)
        assert pair[1].key in str(caught.value)
    assert len(topological([pair[0], as_node(total(pair[0]))])) == 2


def test_a_directory_with_another_keys_output_is_not_a_hit(tmp_path, monkeypatch):
    """The collision with what an earlier run left: damage, naming both keys, and no overwriting."""
    monkeypatch.setattr(step_module, "_KEY_DIGITS", 0)
    bring_up(str(tmp_path), numbers(count=2))
    before = (tmp_path / "numbers-" / "manifest.json").read_bytes()
    (entry,) = plan([as_node(numbers(count=4))], Store(str(tmp_path)))
    assert entry.status == "corrupt"
    with pytest.raises(CorruptOutput, match=as_node(numbers(count=4)).key):
        bring_up(str(tmp_path), numbers(count=4))
    assert (tmp_path / "numbers-" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("value", [None, numbers], ids=["None", "step"])
def test_a_missing_or_foreign_input_is_refused_where_it_is_passed(value):
    """None where an input is required, and things that are no node: named, before any run."""
    with pytest.raises(InputError, match=r"scaled\(numbers=...\): expected Numbers, got"):
        scaled(value, scale=Scale(1))


def test_inputs_that_are_left_out_are_refused():
    """An input or a configuration that has no default must be given; an optional one need not."""
    with pytest.raises(InputError, match="missing a required argument: 'numbers'"):
        scaled(scale=Scale(1))
    with pytest.raises(InputError, match="missing a required"):
        scaled(numbers(count=2))
    assert as_node(total(numbers(count=2), None)).key == as_node(total(numbers(count=2))).key
    with pytest.raises(InputError, match="expected the output of a step call"):
        as_node(None)


def test_one_step_with_several_configurations_can_be_told_apart(tmp_path):
    """A graph may call a step twice; what is shown for each is its own, and stays its own."""
    calls = [scaled(numbers(count=4), scale=Scale(factor)) for factor in range(30)]
    nodes = topological([as_node(call) for call in calls])
    shown = unique_labels(nodes)
    assert len(set(shown.values())) == len(nodes) == 31
    assert shown[as_node(numbers(count=4)).key] == "numbers"
    for call in calls:
        node = as_node(call)
        assert shown[node.key] == f"scaled@{node.key[:6]}"
    assert unique_labels(list(reversed(nodes))) == shown


def test_names_that_imitate_a_key_are_told_apart_too(monkeypatch):
    """A name given by hand that is what another node would be shown as."""
    first, second = (scaled(numbers(count=4), scale=Scale(n)) for n in (1, 2))
    third = named(numbers(count=2), f"scaled@{as_node(first).key[:6]}")
    nodes = [as_node(n) for n in (first, second, third)]
    assert len(set(unique_labels(nodes).values())) == 3
    monkeypatch.setattr(order, "_SHOWN_DIGITS", 0)
    assert len(set(unique_labels(nodes).values())) == 3


@pytest.mark.slow
def test_a_chain_longer_than_the_stack(tmp_path):
    """Order, plan, needed steps and lineage."""
    prefix = str(tmp_path)
    targets = chain(1500)
    order = topological(targets)
    assert len(order) == 1500 > sys.getrecursionlimit()
    assert [e.status for e in plan(targets, Store(prefix))] == ["miss"] * 1500
    assert len(needed_keys(targets, set())) == 1500
    publish(prefix, order)
    assert {e.status for e in plan(targets, Store(prefix))} == {"hit"}
    found = lineage([storage.join(prefix, targets[0].directory)])
    assert [a.directory for a in found] == [node.directory for node in order]


def test_a_lineage_leaves_out_what_was_deleted(tmp_path):
    """An output whose input was deleted from the store."""
    source = numbers(count=4)
    bring_up(str(tmp_path), total(scaled(source, scale=Scale(2)), source))
    node = as_node(total(scaled(source, scale=Scale(2)), source))
    storage.delete_tree(path_of(str(tmp_path), source))
    found = lineage([storage.join(str(tmp_path), node.directory)])
    assert [a.manifest.label for a in found] == ["scaled", "total"]


def test_a_lineage_that_comes_back_to_itself_is_damage(tmp_path):
    """Manifests that say an output was made from itself: an error and no hang."""
    publish(str(tmp_path), _ring(3))
    (node, *_) = _ring(3)
    with pytest.raises(CorruptOutput, match="made from itself"):
        lineage([storage.join(str(tmp_path), node.directory)])


def test_explaining_a_change_does_not_compare_everything_with_everything(tmp_path, monkeypatch):
    """A changed source under two hundred steps: comparisons grow with the steps, not their square.

    Counted, not timed: 1,000 steps took 34 s when every step was compared with every earlier one.
    """
    publish(str(tmp_path), topological(wide_graph(200)))
    compared = []
    real = changes.fingerprint.difference

    def counting(old: Any, new: Any, path: str = "") -> list[str]:
        compared.extend([1] if not path else [])
        return real(old, new, path)

    monkeypatch.setattr(changes.fingerprint, "difference", counting)
    entries = plan(wide_graph(200, count=6), Store(str(tmp_path)))
    assert {entry.status for entry in entries} == {"miss"}
    assert 0 < len(compared) <= 20 * len(entries)


def test_an_argument_without_an_annotation_is_refused_where_the_step_is_declared():
    """Its type is what tells inputs from configuration."""
    with pytest.raises(InputError, match="argument 'count' has no annotation"):

        @step(output=Numbers, version=1, name="unannotated")
        def unannotated(run, *, count):
            return {}
