"""Every command and every snippet of the README and of docs/start.md runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README, START = (ROOT / "README.md").read_text(), (ROOT / "docs" / "start.md").read_text()
OWN_STEP = (ROOT / "docs" / "guides" / "add_a_step.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


COMMANDS = [line for block in blocks(README, "sh") for line in block.splitlines()]
# `make demo` is its recipe up to the tokens; `tests/steps/test_main_job.py` has training in small.
STEPS = ("sample", "train_tokenizer", "tokenize")
DEMO = "ponente run experiments/run_200m.py --smoke --until tokenize"


def test_the_readme_has_commands():
    """The pattern that finds commands finds them."""
    assert len(COMMANDS) >= 4
    assert "make demo" in COMMANDS


def runnable(line: str) -> str:
    """The command as this machine can run it."""
    if "ponente join" in line:
        line = line.partition(" -- ")[2].replace("--prefix gs://my-bucket/runs", "")
        line = line.replace("ponente run", "ponente plan")
    return line.replace(".venv/bin/", "")


@pytest.mark.slow
def test_the_makefile_runs_what_the_readme_says():
    """`make demo` is the smoke preset of the 200M experiment."""
    dry = subprocess.run(
        ["make", "--dry-run", "demo"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "experiments/run_200m.py --smoke" in dry.stdout


def run(line: str, cwd: Path, store: Path) -> str:
    """The output of a shell command that must succeed, with a store of its own.

    Compiled as users compile, not as the other tests do.
    """
    binaries = str(Path(sys.executable).parent)
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=cwd,
        env={
            **inherited,
            "JAX_COMPILATION_CACHE_DIR": str(store.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PONENTE_PREFIX": str(store),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in COMMANDS if line and line != "make demo"])
def test_readme_commands_run(line, tmp_path):
    """Each exits with 0, in a store of its own; the demo is below."""
    out = run(runnable(line), ROOT, tmp_path)
    if line.endswith("plan experiments/run_200m.py"):
        for shown in blocks(README, "text")[2].splitlines():
            assert any(real.startswith(shown) for real in out.splitlines()), shown
    if "run_200m.py" in line:
        assert any(name in out for name in ("report", "train", "block_shuffle", "run-200m"))


def shapes(text: str) -> set[str]:
    """Lines with each number as #, paths without the store's place."""
    return {re.sub(r"\d[\d.,]*", "#", line) for line in text.replace("all ", "").splitlines()}


@pytest.mark.slow
def test_the_readme_shows_what_the_demo_prints(tmp_path):
    """Every line of both runs that the steps up to the tokens print, but for its numbers."""
    first, second = blocks(README, "text")[:2]
    shown = [line for line in first.splitlines() if line.split()[0] in STEPS or "executed" in line]
    assert len(first.splitlines()) == 8
    assert len(shown) == 4
    assert shapes("\n".join(shown)) <= shapes(run(DEMO, ROOT, tmp_path))
    assert shapes(second) <= shapes(run(DEMO, ROOT, tmp_path))


def test_snippets_of_the_readme_are_lines_of_the_experiments():
    """The README quotes the whole graph as the file has it, but for white space."""
    (quoted,) = blocks(README, "python")
    file = (ROOT / "experiments" / "run_200m.py").read_text()
    assert "".join(quoted.split()) in "".join(file.split())
    names = re.findall(r"steps\.(\w+)\(", quoted)
    assert len(names) == 8
    picture = (ROOT / "docs" / "demo.svg").read_text()
    assert all(f">{name}</text>" in picture for name in names)


@pytest.mark.slow
def test_the_way_to_an_experiment_of_ones_own_works(tmp_path):
    """The blocks of docs/start.md after installing, then docs/guides/add_a_step.md's, in order."""
    documents, experiment, notebook = blocks(START, "python")
    own_step = blocks(OWN_STEP, "python")[0]
    store = tmp_path / "runs"
    (tmp_path / "documents.py").write_text(documents)
    run("python documents.py", tmp_path, store)
    (tmp_path / "mine.py").write_text(experiment)
    out = ""
    for line in blocks(START, "sh")[1].splitlines():
        out += run(line.partition("#")[0], tmp_path, store)
    assert "mine  preset quick" in out
    assert "running in this process, without Ray" in out
    assert "--training.batch-size" in out
    (tmp_path / "notebook.py").write_text(notebook)
    printed = run("python notebook.py", tmp_path, store)
    assert (tmp_path / printed.splitlines()[-1]).is_file()
    (tmp_path / "mine_too.py").write_text(own_step)
    printed = run("ponente run mine_too.py", tmp_path, store)
    # Of 400 documents one or two may be in no sample; the words beside their numbers are eight.
    assert 300 < int(re.search(r"(\d+) words", printed).group(1)) <= 400 + 8
