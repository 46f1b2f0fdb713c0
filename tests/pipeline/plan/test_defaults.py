"""A changed default makes outputs stale and builds others; a field that is added does not."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from pipeline import Artifact, InputError
from pipeline.errors import StepFailed
from pipeline.graph.step import StepSpec, as_node
from pipeline.plan.plan import explain, plan
from pipeline.store.outputs import Store
from tests.pipeline.helpers import bring_up, executed, planned, result
from tests.pipeline.toy import Numbers, clamp, numbers, total, write_numbers

CHANGED = "work.size: 2 -> 3 (the default changed)"


def work(
    fields: Mapping[str, int],
    *,
    arguments: Mapping[str, int] | None = None,
    stop_after: int = 4,
    count: int = 10,
    **given: int,
) -> Any:
    """A node of the step `work` in a version of the code whose class and step have these defaults.

    It writes four shards of `size` numbers, or stops with an error after some.
    """
    declared = [(name, int, dataclasses.field(default=value)) for name, value in fields.items()]
    config: Any = dataclasses.make_dataclass("Work", declared, frozen=True)
    more = dict(arguments or {})

    def body(run: Any, numbers: Artifact, *, work: Any, **arguments: int) -> Mapping[str, Any]:
        for i in range(4):
            if i == stop_after:
                raise InputError("stopped")
            run.map(write_numbers, {f"part/{i}": (work.size * i, work.size)})
        return {"sizes": [s.result["count"] for s in run.finished().values()]}

    hints = {"numbers": Numbers, "work": config, **dict.fromkeys(more, int)}
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("run", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += [
        inspect.Parameter(name, kind, default=more.get(name, inspect.Parameter.empty))
        for name in hints
    ]
    vars(body).update({"__signature__": inspect.Signature(parameters)})
    body.__annotations__ = hints
    step: Any = StepSpec(body, Numbers, 1, "work")
    return step(numbers=clamp(numbers(count=10), limit=count), work=config(**given))


def explained(store: str, node: Any) -> str:
    entries = plan([as_node(node)], Store(store))
    return "\n".join(explain(entries, entries[-1], Store(store)))


def unfinished(store: str, node: Any) -> None:
    with pytest.raises(StepFailed, match="stopped"):
        bring_up(store, node)


@pytest.mark.parametrize(
    "newer",
    [
        {"fields": {"size": 2, "depth": 7}},
        {"fields": {"size": 2}, "arguments": {"another": 1}},
        {"fields": {}},
    ],
    ids=["a field more", "an argument more", "a field less"],
)
def test_a_default_that_came_or_went_leaves_outputs_up_to_date(tmp_path, newer):
    """The key is the same, and nothing that both sides have is another."""
    store, old = str(tmp_path), work({"size": 2})
    bring_up(store, old)
    new = work(**newer)
    assert as_node(new).key == as_node(old).key
    assert planned(store, new).status == "hit"
    assert executed(store, new) == []


def test_a_default_that_changed_makes_an_output_stale(tmp_path):
    """Under the same key; plan and explain name the field, and the rebuild is what is asked for."""
    store, old, new = str(tmp_path), work({"size": 2}), work({"size": 3})
    bring_up(store, old)
    assert as_node(new).key == as_node(old).key
    assert planned(store, new).status == "stale"
    assert planned(store, new).reason == CHANGED
    assert CHANGED in explained(store, new)
    assert executed(store, new) == ["work"]
    assert result(store, new)["sizes"] == [3] * 4
    assert planned(store, new).status == "hit"
    # And back again: what is there now was made with the other default.
    assert executed(store, old) == ["work"]
    assert result(store, old)["sizes"] == [2] * 4


@pytest.mark.parametrize("unfinished_first", [False, True])
def test_true_is_not_one_as_a_changed_default_either(tmp_path, unfinished_first):
    """Neither a published output nor an unfinished build of the one is the other's."""
    store = str(tmp_path)
    if unfinished_first:
        unfinished(store, work({"size": 1}, stop_after=2))
        assert "not resumed" in planned(store, work({"size": True})).detail
    else:
        bring_up(store, work({"size": 1}))
        assert planned(store, work({"size": True})).reason == "work.size: 1 -> True" + CHANGED[17:]


def test_given_values_are_not_confused_with_changed_defaults(tmp_path):
    """A value that was always written out is up to date whatever the default is."""
    store = str(tmp_path)
    bring_up(store, work({"size": 2}, size=5))
    assert planned(store, work({"size": 3}, size=5)).status == "hit"
    assert "size: 5 is now the default" in planned(store, work({"size": 5})).reason


def test_an_unfinished_build_survives_a_field_that_is_added(
    tmp_path, monkeypatch, tmp_path_factory
):
    store, marks = str(tmp_path), tmp_path_factory.mktemp("marks") / "marks"
    monkeypatch.setenv("PONENTE_MARKS", str(marks))
    unfinished(store, work({"size": 2}, stop_after=2))
    new = work({"size": 2, "depth": 7})
    assert "2 of" in planned(store, new).detail
    marks.unlink()
    bring_up(store, new)
    assert result(store, new)["sizes"] == [2] * 4
    assert marks.read_text().split() == ["4", "6"]


@pytest.mark.slow
@pytest.mark.parametrize("published", [False, True], ids=["first", "rebuild"])
def test_an_unfinished_build_is_not_resumed_over_a_changed_default(tmp_path, published):
    """No shard of the old default is in what the new one publishes, and neither way round."""
    store = str(tmp_path)
    if published:
        bring_up(store, work({"size": 9}))
    unfinished(store, work({"size": 2}, stop_after=2))
    new = work({"size": 3})
    if not published:
        assert CHANGED in planned(store, new).reason
        assert CHANGED in explained(store, new)
    unfinished(store, work({"size": 3}, stop_after=3))
    bring_up(store, new)
    assert result(store, new)["sizes"] == [3] * 4


def test_a_build_remembers_every_configuration_that_resumed_it(tmp_path):
    """A field that was added while it was unfinished counts when its default changes later."""
    store = str(tmp_path)
    unfinished(store, work({"size": 2}, stop_after=1))
    unfinished(store, work({"size": 2, "depth": 7}, stop_after=2))
    new = work({"size": 2, "depth": 8})
    assert "work.depth: 7 -> 8 (the default changed)" in planned(store, new).reason
    assert "shards finished" not in planned(store, new).detail


def test_an_output_is_stale_when_the_default_of_a_younger_field_changes(tmp_path):
    """A run took it for the same when the field was added, with the default of that time."""
    store = str(tmp_path)
    bring_up(store, work({"size": 2}))
    assert planned(store, work({"size": 2, "depth": 8})).status == "hit"
    assert executed(store, work({"size": 2, "depth": 7})) == []
    new = work({"size": 2, "depth": 8})
    assert planned(store, new).status == "stale"
    assert planned(store, new).reason == "work.depth: 7 -> 8 (the default changed)"
    assert planned(store, work({"size": 2, "depth": 7})).status == "hit"


def test_equal_contents_of_another_default_are_not_referred_to(tmp_path):
    """The index of actions does not hand over what was made with the old default."""
    store = str(tmp_path)
    bring_up(store, total(work({"size": 2}, count=10)))
    # Another key above: the same numbers come out of another limit.
    new = work({"size": 3}, count=20)
    assert executed(store, new) == ["clamp", "work"]
    assert result(store, new)["sizes"] == [3] * 4
    assert executed(store, work({"size": 3, "depth": 7}, count=30)) == ["clamp"]
