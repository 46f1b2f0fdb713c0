"""Names of steps, as flags take them and outputs show them; the size of what a plan says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pipeline import (
    Artifact,
    Experiment,
    InputError,
    Result,
    StepContext,
    named,
    select,
    step,
    sweep,
)
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.plan.state import pick, with_force
from tests.pipeline.helpers import bring_up, result
from tests.pipeline.toy import Scale, numbers, scaled, total


def labels(artifacts):
    return [as_node(each).label for each in artifacts]


def test_two_names_of_one_step_both_name_it():
    """Equal keys are one step of the graph, which answers to either name."""
    first, second = named(numbers(count=5), "first"), named(numbers(count=5), "second")
    order = topological([as_node(total(first, second))])
    assert [node.label for node in order] == ["first", "total"]
    assert pick(order, "second") == pick(order, "first") == [order[0]]
    with pytest.raises(InputError, match="did you mean second"):
        pick(order, "secnd")


def test_a_flag_takes_labels_with_commas_and_brackets_among_others():
    """As one name or in a list; in a list the longest label that fits is meant."""
    made = sweep(lambda size: numbers(count=size[0], shards=size[1]), [(1, 1), (4, 2)])
    odd = named(total(made[0]), "a, b")
    order = topological([as_node(odd), as_node(made[1]), as_node(named(total(made[1]), "a"))])
    name = {node.label: node for node in order}
    assert pick(order, "numbers[(4, 2)]") == [name["numbers[(4, 2)]"]]
    both = pick(order, "a, b,numbers[(1, 1)],a")
    assert both == [name["a, b"], name["numbers[(1, 1)]"], name["a"]]
    assert {node.label for node in pick(order, "numbers,")} == {
        "numbers[(1, 1)]",
        "numbers[(4, 2)]",
    }
    with pytest.raises(InputError, match="no step 'b'"):
        pick(order, "a,b")
    keys = {node.key for node in order if node.label in ("a, b", "numbers[(1, 1)]")}
    command = with_force("ponente run x.py", keys, order)
    assert command == "ponente run x.py --force 'numbers[(1, 1)],a, b'"
    assert with_force("mine.run('quick')", keys, order) == (
        "mine.run('quick', force=('numbers[(1, 1)]', 'a, b'))"
    )
    assert with_force("mine.run()", (), order) == "mine.run()"


@dataclasses.dataclass(frozen=True)
class Knobs:
    """A configuration with another inside."""

    rate: float
    scale: Scale


def test_a_sweep_labels_paths_and_configurations_by_what_differs():
    """Ends of paths, fields that differ; the number of a value whose text fits no label."""
    paths = ["gs://a/x/data.jsonl", "gs://a/y/data.jsonl"]

    def built(values):
        return labels(sweep(lambda value: numbers(count=len(str(value))), values))

    assert built(paths) == ["numbers[x:data.jsonl]", "numbers[y:data.jsonl]"]
    assert built([Path("/data/b"), Path("/data/c")]) == ["numbers[b]", "numbers[c]"]
    rates = [Knobs(0.1, Scale()), Knobs(0.2, Scale()), Knobs(0.2, Scale(3))]
    assert built(rates) == [
        "numbers[rate=0.1, factor=1]",
        "numbers[rate=0.2, factor=1]",
        "numbers[rate=0.2, factor=3]",
    ]
    assert built(["x" * 70, "two\nlines"]) == ["numbers[1]", "numbers[2]"]
    assert built({"one": 1, "same": 1}) == ["numbers[one]", "numbers[same]"]


@pytest.mark.slow
def test_a_sweep_runs_in_the_order_in_which_it_is_declared(tmp_path):
    """The steps of one layer, and what they are selected by."""
    best = select(sweep(lambda n: total(numbers(count=n)), [4, 8, 2]), by="total")
    done = [node.label for node in bring_up(str(tmp_path), best).executed]
    assert [label for label in done if "[" in label] == ["total[4]", "total[8]", "total[2]"]


def test_a_selection_names_its_candidates_as_this_graph_does(tmp_path):
    """Not as the graph did that built them first, or that built the selection."""
    store, source = str(tmp_path), numbers(count=4)

    def chosen(factors, mode):
        made = sweep(lambda factor: scaled(source, scale=Scale(factor)), factors)
        return select([select(made, by="sum", mode=mode)], by="sum")

    def said(graph):
        execution = bring_up(store, graph)
        labels = {node.key: node.label for node in execution.order}
        (target,) = execution.targets
        inner = execution.published[as_node(graph).inputs["candidates[0]"].key]
        return [*inner.headline(labels), *execution.published[target.key].headline(labels)]

    bring_up(store, chosen({"small": 1, "large": 2}, "min"))
    again = chosen({"A": 1, "B": 2}, "max")
    assert said(again) == ["best by sum: scaled[B] (12)", "best by sum: select (12)"]
    (inner,) = as_node(again).inputs.values()
    table = result(store, inner)["measured"]["candidates"]
    assert [row["step"] for row in table] == ["scaled[A]", "scaled[B]"]
    renamed = chosen({"left": 1, "right": 2}, "max")
    assert said(renamed)[0] == "best by sum: scaled[right] (12)", "and it was a hit"


@step(output=Artifact, version=1)
def knot(
    run: StepContext, left: Artifact | None = None, right: Artifact | None = None, *, salt: int = 0
) -> Result:
    return {}


def ladder(salt: int = 0) -> tuple[Artifact, ...]:
    """Twelve layers of two steps, each reading both of the layer before."""
    pair = named(knot(salt=salt), "left-0"), named(knot(salt=2), "right-0")
    for layer in range(1, 12):
        left, right = pair
        pair = named(knot(left, right), f"left-{layer}"), named(knot(right, left), f"right-{layer}")
    return pair


@pytest.mark.slow
def test_a_reason_does_not_repeat_the_reasons_behind_it(tmp_path, capsys):
    """The cause reaches the last layer by 2^10 paths and more, and is to be named, not listed."""

    def command(verb: str, salt: str) -> list[str]:
        arguments = [verb, "--prefix", str(tmp_path), "--executor", "inline"]
        with pytest.raises(SystemExit) as stop:
            Experiment(ladder).main([*arguments, "--salt", salt])
        assert stop.value.code == 0
        return capsys.readouterr().out.splitlines()

    command("run", "0")
    shown = command("plan", "1")
    last = next(line for line in shown if " left-11 " in line)
    assert "salt: 0 -> 1" in last
    assert max(len(line) for line in shown) < 1_000
