"""Declaring a graph: types of inputs, what is in a key, what a plan says."""

from __future__ import annotations

import pytest

from pipeline import InputError, named, step
from pipeline.graph.step import as_node
from pipeline.plan.plan import plan
from pipeline.store.outputs import Store
from tests.pipeline.helpers import bring_up
from tests.pipeline.toy import Numbers, Scale, clamp, numbers, scaled, total


def test_an_artifact_of_another_type_is_refused_where_it_is_passed():
    """The message names the step, the argument and both types."""
    first = total(numbers(count=4))
    with pytest.raises(InputError, match=r"total\(left=\.\.\.\): expected Numbers, got Total"):
        total(first)
    with pytest.raises(InputError, match="expected Numbers, got 3 of type int"):
        total(3)
    with pytest.raises(InputError, match=r"scaled\(scale=\.\.\.\): expected Scale, got 2 of type"):
        scaled(numbers(count=4), scale=2)
    with pytest.raises(InputError, match="expected a configuration value"):
        numbers(count=numbers(count=4))
    with pytest.raises(InputError, match="unexpected keyword"):
        numbers(count=4, colour=1)


def test_what_a_step_refuses_is_refused_where_it_is_called():
    """Also a value of a type that its check was not written for."""
    assert as_node(clamp(numbers(count=4), limit=3)).config == {"limit": 3}
    with pytest.raises(InputError, match=r"clamp\.limit: expected 0 or more, got -1"):
        clamp(numbers(count=4), limit=-1)
    with pytest.raises(InputError, match=r"clamp\(\.\.\.\): '<' not supported"):
        clamp(numbers(count=4), limit="3")


def test_a_step_is_named_by_its_function_or_explicitly():
    """Not by its module, so a step of the file that is run has the name it has when imported."""

    def body(run):
        return {}

    body.__module__ = "__main__"
    assert step(output=Numbers, version=1)(body).name == "body"
    assert step(output=Numbers, version=1, name="mine")(body).name == "mine"


def _key(node):
    return as_node(node).key


def test_keys_follow_config_version_and_inputs_and_nothing_else():
    """Config and upstream config change a key; runtime values and display names do not."""
    base = scaled(numbers(count=4), scale=Scale(2))
    assert _key(base) == _key(scaled(numbers(count=4), scale=Scale(2)))
    assert _key(base) == _key(scaled(numbers(count=4), scale=Scale(2, note="x"), delay=3))
    assert _key(base) == _key(named(scaled(numbers(count=4), scale=Scale(2)), "other"))
    assert _key(base) != _key(scaled(numbers(count=5), scale=Scale(2)))
    assert _key(base) != _key(scaled(numbers(count=4), scale=Scale(3)))
    a, b = numbers(count=4), numbers(count=6)
    assert len({_key(each) for each in (total(a), total(a, a), total(a, b), total(b, a))}) == 4
    assert _key(numbers(count=4)) == _key(numbers(count=4, shards=2)), "defaults are config"
    newer = step(output=Numbers, version=2, name=numbers.name)(numbers.function)
    assert _key(newer(count=4)) != _key(numbers(count=4))


def test_plan_says_hit_miss_and_the_field_that_changed(tmp_path):
    """After a run, a changed field is named with both values, and dependents say through whom."""
    store = str(tmp_path)

    def graph(factor):
        return total(scaled(numbers(count=4), scale=Scale(factor)))

    first = plan([as_node(graph(2))], Store(store))
    assert [(p.status, p.needed, p.reason) for p in first] == [
        ("miss", True, "never built here")
    ] * 3
    bring_up(store, graph(2))
    assert [p.status for p in plan([as_node(graph(2))], Store(store))] == ["hit"] * 3
    changed = {p.node.label: p for p in plan([as_node(graph(3))], Store(store))}
    assert changed["numbers"].status == "hit"
    assert changed["scaled"].reason == "scale.factor: 2 -> 3"
    assert changed["total"].reason == "input left changed (scaled: scale.factor: 2 -> 3)"
    assert not changed["numbers"].needed


def test_plan_writes_nothing(tmp_path):
    plan([as_node(total(numbers(count=4)))], Store(str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
