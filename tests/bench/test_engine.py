"""The comparison of engines measures what it says: the graphs, the check, the printed lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import engine_graphs
from tests.bench.engine import lines_are_right
from tests.bench.engine_process import Ended, Running
from tests.bench.engine_systems import ROOT, Ponente


def run(graph: str, store: Path, scratch: Path) -> Ended:
    """Our engine on one toy graph, in a process of its own."""
    system = Ponente()
    command = system.command("run", graph, store, "inline")
    return Running(command, system.environment(store), scratch, scratch / "output").wait()


@pytest.mark.parametrize(("graph", "steps"), [("2", 2), ("20", 20), ("1000", 1000)])
def test_a_graph_has_its_steps_and_lists_inputs_first(graph, steps):
    """As many steps as its name says; each reads up to two that come before it."""
    tasks = engine_graphs.tasks(graph)
    assert len({task.name for task in tasks}) == len(tasks) == steps
    seen: set[str] = set()
    for task in tasks:
        assert set(task.parents) <= seen
        assert (len(task.parents) == 0) == task.name.startswith("step-000-")
        seen.add(task.name)


@pytest.mark.parametrize("graph", list(engine_graphs.SHAPES))
def test_a_changed_first_step_changes_exactly_what_depends_on_it(graph):
    """Against reachability, followed from the first step."""
    tasks = engine_graphs.tasks(graph)
    reached = {tasks[0].name}
    for task in tasks:
        if reached & set(task.parents):
            reached.add(task.name)
    old = engine_graphs.evaluate(graph)
    new = engine_graphs.evaluate(graph + engine_graphs.CHANGED)
    assert {name for name in old if old[name] != new[name]} == reached
    assert reached & set(engine_graphs.targets(graph))


@pytest.mark.slow
def test_the_check_of_results_sees_what_is_missing_and_what_is_wrong(tmp_path):
    """True for the graph that was run; False for another's, an empty store, a changed byte."""
    system, store = Ponente(), tmp_path / "store"
    assert not lines_are_right(system, "20", store)
    assert run("20", store, tmp_path).code == 0
    assert lines_are_right(system, "20", store)
    assert not lines_are_right(system, "20-changed", store)
    last = engine_graphs.targets("20")[-1]
    (system.output("20", last, store) / engine_graphs.OUTPUT).write_text("another line\n")
    assert not lines_are_right(system, "20", store)


@pytest.mark.slow
def test_the_command_prints_measurements_of_ours_alone():
    """Nothing but JSON on stdout, each line with its system and versions; the rest on stderr."""
    command = [sys.executable, "-m", "tests.bench.engine", "--graphs", "2", "--repeat", "1"]
    done = subprocess.run(
        [*command, "--no-behaviours"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert {record["system"] for record in records} == {"ponente"}
    assert all("python" in record["versions"] for record in records)
    colds = [record for record in records if record["measure"] == "cold"]
    assert [(record["correct"], record["codes"]) for record in colds] == [(True, [0])]
    assert {"no-op", "plan, changed"} <= {record["measure"] for record in records}
    assert "ours only" in done.stderr
