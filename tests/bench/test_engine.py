"""The bench of the engine measures what it says: the graphs, the check, the printed lines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.bench import engine, engine_graphs
from tests.bench.engine import lines_are_right
from tests.bench.engine_process import Running


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


@pytest.mark.slow
def test_the_check_of_results_sees_what_is_missing_and_what_is_wrong(tmp_path):
    """True for the graph that was run; False for another's, an empty store, a changed byte."""
    store = tmp_path / "store"
    assert not lines_are_right("20", store)
    run = engine.command("run", "20", store)
    assert Running(run, engine.ENVIRONMENT, tmp_path, tmp_path / "output").wait().code == 0
    assert lines_are_right("20", store)
    assert not lines_are_right("20-changed", store)
    last = engine_graphs.targets("20")[-1]
    (engine.output("20", last, store) / engine_graphs.OUTPUT).write_text("another line\n")
    assert not lines_are_right("20", store)


@pytest.mark.slow
def test_the_command_prints_measurements():
    """Nothing but JSON on stdout, each line with its versions; the rest on stderr."""
    command = [sys.executable, "-m", "tests.bench.engine", "--graphs", "2", "--repeat", "1"]
    done = subprocess.run(
        [*command, "--no-behaviours"], cwd=engine.ROOT, capture_output=True, text=True, check=True
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert all("python" in record["versions"] for record in records)
    colds = [record for record in records if record["measure"] == "cold"]
    assert [(record["correct"], record["codes"]) for record in colds] == [(True, [0])]
    assert {"no-op", "plan, changed"} <= {record["measure"] for record in records}
    assert "plan, changed" in done.stderr
