"""An experiment as a value: settings from a signature, presets, methods, files with one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline import Artifact, Experiment, InputError
from pipeline.errors import StepFailed
from pipeline.graph.declaration import load_experiment
from pipeline.graph.step import as_node
from tests.pipeline.toy import Scale, Total, clamp, numbers, refuse, scaled, total


@dataclass(frozen=True)
class Rates:
    """A nested configuration."""

    high: float = 0.5
    low: float = 0.25


def graph(count: int = 10, limit: int | None = 100, rates: Rates = Rates(), factor=3) -> Total:
    cut = clamp(numbers(count=count), limit=limit or 1)
    return total(cut, scaled(cut, scale=Scale(factor)))


TOY = Experiment(graph, wide={"count": 20})


@pytest.mark.slow
def test_a_run_returns_the_artifact_the_function_returns(tmp_path):
    """Sum of 0..19 and of three times that; the second run publishes nothing new."""
    store = str(tmp_path)
    first = TOY.run("wide", prefix=store, executor="inline")
    assert isinstance(first, Total)
    assert first.result["total"] == 190 * 4
    assert TOY.run("wide", prefix=store, executor="inline").manifest == first.manifest
    assert TOY.run("wide", prefix=store, executor="inline", factor=1).result["total"] == 380


def test_a_run_of_several_targets_returns_a_tuple(tmp_path):

    def both(count: int = 4) -> tuple[Artifact, Artifact]:
        made = numbers(count=count)
        return total(made), made

    sums, made = Experiment(both).run(prefix=str(tmp_path), executor="inline")
    assert sums.result["total"] == sum(made.values()) == 6


def test_a_run_of_chosen_steps_returns_theirs(tmp_path):
    """The function's own targets may not be there."""

    def run(**chosen):
        return TOY.run(prefix=str(tmp_path), executor="inline", **chosen)

    cut = run(until="clamp")
    assert sum(cut.values()) == 45
    assert run(only="clamp").manifest == cut.manifest
    made, also = run(until=("numbers", "clamp"))
    assert (sum(made.values()), also.manifest) == (45, cut.manifest)


@pytest.mark.parametrize("several", [str, Path, lambda store: [Path(store)], lambda s: (s,)])
def test_a_shared_store_is_given_as_text_or_path_or_several(tmp_path, several):
    TOY.run(prefix=tmp_path / "team", executor="inline")
    found = TOY.run(prefix=tmp_path / "mine", shared=several(str(tmp_path / "team")))
    assert found.path.startswith(f"{tmp_path}/team")


@pytest.mark.parametrize("several", ["total", "total,", ["total"], {"total"}])
def test_steps_are_given_as_text_or_several(tmp_path, several):
    first = TOY.run(prefix=tmp_path, executor="inline")
    assert TOY.run(prefix=tmp_path, executor="inline").manifest == first.manifest
    again = TOY.run(prefix=tmp_path, executor="inline", force=several)
    assert again.manifest.attempt != first.manifest.attempt


def test_text_that_a_flag_does_not_take_is_refused(tmp_path):
    with pytest.raises(InputError, match="ray"):
        TOY.run(prefix=tmp_path, executor="rya")
    for wait in ("long", "-5s", "", -1, -0.5, float("nan"), float("inf"), True, [5], b"5s"):
        with pytest.raises(InputError, match=r"wait=.*: expected "):
            TOY.run(prefix=tmp_path, wait=wait)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_raises(tmp_path):
    failing = Experiment(lambda count=4: refuse(numbers(count=count)))
    with pytest.raises(StepFailed, match="expected something else"):
        failing.run(prefix=str(tmp_path), executor="inline")


def test_the_retry_of_a_call_forces_no_step_that_it_has_built(tmp_path):
    failing = Experiment(lambda count=4: refuse(numbers(count=count)))
    with pytest.raises(StepFailed) as error:
        failing.run(prefix=str(tmp_path), force="numbers", executor="inline")
    assert str(error.value).endswith(f".run(prefix={str(tmp_path)!r}, executor='inline')")


def test_a_plan_is_entries(tmp_path):
    entries = TOY.plan(prefix=str(tmp_path / "store"), limit=5)
    assert [(e.node.label, e.status, e.needed) for e in entries] == [
        (label, "miss", True) for label in ("numbers", "clamp", "scaled", "total")
    ]
    assert not (tmp_path / "store").exists()


def test_settings_are_the_signature_and_presets_replace_some():
    """Frozen, typed by annotation or default, the preset's values where it has any."""
    assert dataclasses.asdict(TOY.settings("wide", factor=2)) == {
        "count": 20,
        "limit": 100,
        "rates": {"high": 0.5, "low": 0.25},
        "factor": 2,
    }
    (node,) = TOY.graph("wide")
    assert node.key == as_node(graph(count=20)).key


def keyless(count) -> Total:
    return total(numbers(count=count))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Experiment(graph, w={"cuont": 1}), "preset 'w': no setting 'cuont'; did you mean"),
        (lambda: Experiment(graph, w={"count": "1"}), "preset 'w': count: expected int, got '1'"),
        (lambda: Experiment(graph, w={"rates": 3}), "rates: expected Rates, got 3"),
        (lambda: Experiment(graph, count={}), "preset 'count' is named like a setting"),
        (lambda: Experiment(graph, jobs={}), "'jobs' is a flag of the command line"),
        (lambda: Experiment(lambda jobs=3: numbers(count=jobs)), r"\(--jobs\) and cannot be a"),
        (lambda: Experiment(graph, one_token={}), "'one_token' reads as the name of a secret"),
        (lambda: Experiment(keyless), r"keyless\(count\): expected a setting with a default"),
        (lambda: Experiment(lambda names=(): names), "expected an annotation"),
        (lambda: TOY.graph("wyde"), "no preset 'wyde'; did you mean wide"),
        (lambda: TOY.graph(count=1.5), "graph: count: expected int, got 1.5"),
        (lambda: TOY.graph(limit=-1), r"test_experiment\.py:\d+: clamp.limit: expected 0 or more"),
        (lambda: Experiment(lambda count=1: count).graph(), "expected the output of a step call"),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    """At construction where the signature can tell, with file and line where the function does."""
    with pytest.raises(InputError, match=message):
        make()


FILE = """
from pipeline import Artifact, Experiment, Result, StepContext, step
from beside import FACTOR

@step(output=Artifact, version=1)
def made(run: StepContext, *, count: int) -> Result:
    return {"headline": [f"made {FACTOR * count}"]}

def experiment_of_mine(count: int = 1) -> Artifact:
    return made(count=count)

experiment = Experiment(experiment_of_mine, many={"count": 9})
other = Experiment(lambda: made(count=2))

if __name__ == "__main__":
    experiment.main()
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "beside.py").write_text("FACTOR = 5\n")
    path = tmp_path / "file_of_mine.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("executor", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_file_has_the_same_outputs_however_it_is_started(file, tmp_path, executor):
    """As a script it builds; the command `ponente`, started elsewhere, finds all up to date."""

    def run(*command):
        done = subprocess.run(
            command, cwd=tmp_path.parent, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    flags = ["--many", "--prefix", str(tmp_path / "store"), "--executor", executor]
    verb = [sys.executable, "-m", "steps.cli", "run", f"{file}:experiment"]
    # The command runs first where Ray does: its workers know neither the file nor its folder.
    first, second = [verb, [sys.executable, str(file)]][:: 1 if executor == "ray" else -1]
    assert "made 45" in run(*first, *flags)
    assert "all 1 steps up to date" in run(*second, *flags)


def test_a_file_with_several_experiments_asks_which(file, monkeypatch):
    """Unless it is named; a name that is not there gets the nearest."""
    monkeypatch.chdir(file.parent)
    monkeypatch.syspath_prepend(str(file.parent))
    with pytest.raises(InputError, match=r"name one: file_of_mine.py:experiment"):
        load_experiment("file_of_mine.py")
    assert list(load_experiment("file_of_mine.py:experiment").presets) == ["full", "many"]
    with pytest.raises(InputError, match="did you mean other"):
        load_experiment("file_of_mine.py:othr")
    assert os.path.basename(sys.modules["file_of_mine"].__file__) == "file_of_mine.py"
    del sys.modules["file_of_mine"], sys.modules["beside"]
