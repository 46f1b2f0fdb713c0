"""The tutorial: its notebook runs top to bottom, and what its page quotes and commands is so."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import steps
from experiments import tutorial_bytes
from pipeline import Experiment
from pipeline.store.manifest import load
from pipeline.store.storage import read_bytes
from steps.artifacts import Scores

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text())
PAGE = (ROOT / "docs" / "tutorial.md").read_text()


def cells() -> list[str]:
    """The source of the notebook's code cells."""
    return ["".join(c["source"]) for c in NOTEBOOK["cells"] if c["cell_type"] == "code"]


def test_the_notebook_keeps_no_outputs():
    """They would be somebody's, and large."""
    assert NOTEBOOK["nbformat"] == 4
    for cell in NOTEBOOK["cells"]:
        code = {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
        fields = {"cell_type": cell["cell_type"], "metadata": {}, "source": cell["source"]}
        assert cell == {**fields, **code}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """The names that the notebook leaves behind, and its store."""
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        names: dict = {}
        for number, source in enumerate(cells()):
            exec(compile(source, f"cell {number}", "exec"), names)
        yield names, folder / "runs"


@pytest.mark.slow
def test_the_notebook_runs_top_to_bottom(notebook, capsys):
    """The model learns, completes as it trains, and the homework runs what depends on it."""
    names, _ = notebook
    trained, other = names["trained"], names["other"]
    rows = trained.rows("evaluations")
    assert [row["step"] for row in rows] == [0, 4, 8]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert abs(rows[0]["loss"] - 5.55) < 0.1  # ln 257: nothing is known
    assert [row["prompt"] for row in trained.rows("samples")] == ["Return the "] * 3
    assert trained.result["last"]["loss"] == names["losses"]["as it was"]
    assert other.path != trained.path
    assert names["again"] == ["generate", "report"]
    assert "This module provides" in read_bytes(names["report"].page).decode()


def of_model() -> steps.Scores:
    """Answers to two problems by the tutorial's model."""
    _, trained = tutorial_bytes.experiment.build(tutorial_bytes.experiment.presets["smoke"])
    return steps.code_evaluation(trained, problems="problems.jsonl", new_tokens=80)


def of_the_problems() -> steps.Scores:
    """The answers that the problems bring."""
    return steps.code_evaluation(problems="problems.jsonl")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_programs_of_the_model_are_judged(notebook, monkeypatch):
    """Eight steps teach no Python, so its answers fail where the given ones pass."""
    _, store = notebook
    monkeypatch.chdir(store.parent)
    problem = {"language": "python", "tests": "assert f() == 1"}
    prompts = {"one": "def f():\n    return", "two": "def f(x=1):\n    return"}
    asked = [{**problem, "name": n, "prompt": p, "completion": " 1\n"} for n, p in prompts.items()]
    Path("problems.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    given, written = (
        Experiment(function).run(prefix=str(store), executor="inline")
        for function in (of_the_problems, of_model)
    )
    assert isinstance(written, Scores)
    assert given.tasks[0] == {
        **{"task": "all", "items": 2, "attempts": 1, "compiled": 1.0, "pass@1": 1.0}
    }
    assert written.tasks[0]["pass@1"] == 0.0
    lines = read_bytes(f"{written.shard('programs')}/programs.jsonl").decode().splitlines()
    programs = [json.loads(line)["program"] for line in lines]
    assert [p.startswith(prompts[n]) for n, p in zip(prompts, programs, strict=True)] == [True] * 2
    assert load(written.input_paths["model"]).key == notebook[0]["trained"].manifest.key


def test_the_page_quotes_the_experiment():
    """Line by line, in order, and all of the function; the formatter takes the indentation."""
    source = (ROOT / "experiments" / "tutorial_bytes.py").read_text()
    function = source[source.index("def tutorial_bytes(") : source.index("experiment = ")]
    quoted = "".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    lines = [[line.strip() for line in text.splitlines()] for text in (quoted, function)]
    assert [x for x in lines[0] if x] == [x for x in lines[1] if x]


COMMANDS = re.findall(r"ponente (?:run|plan) experiments/tutorial_bytes\.py(.*)", PAGE)


@pytest.mark.parametrize("flags", COMMANDS)
def test_commands_of_the_page_are_understood(flags, tmp_path, capsys):
    """Each is planned: its flags exist, and its values are accepted."""
    arguments = ["plan", *shlex.split(flags, comments=True), "--prefix", str(tmp_path)]
    with pytest.raises(SystemExit) as stop:
        tutorial_bytes.experiment.main(arguments)
    assert not stop.value.code
    assert "train" in capsys.readouterr().out
