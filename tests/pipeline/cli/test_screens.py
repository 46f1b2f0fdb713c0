"""Screens without UTF-8, closed or narrow end no command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.cli.terminal import Terminal

ROOT = Path(__file__).parents[3]
# Everything that is shown has characters that few screens have.
EXPERIMENT = """
import logging
from pipeline import Artifact, Experiment, Result, StepContext, step

@step(output=Artifact, version=1)
def measure(run: StepContext, *, n: int) -> Result:
    print("print → \\U0001f600 \\udcff")
    logging.getLogger(__name__).warning("warning →")
    run.warn("careful → ±")
    run.progress(n, 3, "→")
    return {"headline": "3.1 ± 0.2 → better"}

def odd(n: int = 2) -> Artifact:
    return measure(n=n)

experiment = Experiment(odd)
experiment.main()
"""
PLAIN_C = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


@pytest.fixture
def file(tmp_path) -> Path:
    (tmp_path / "odd.py").write_text(EXPERIMENT)
    return tmp_path / "odd.py"


def shell(file: Path, redirect: str, **more: str) -> subprocess.CompletedProcess[bytes]:
    """A run by a shell, with a redirection; then the same experiment's plan must be a hit."""
    command = f"{sys.executable} {file} run --executor inline --prefix {file.parent}/runs"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    return subprocess.run(f"{command} {redirect}", shell=True, env=environment, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("redirect", [">&-", ">&- 2>&- <&-"])
def test_a_run_without_a_screen_is_a_run(file, redirect):
    """No file of the store takes the closed stream's number, and its text."""
    done = shell(file, redirect)
    assert done.returncode == 0, done.stderr
    (manifest,) = file.parent.glob("runs/measure-*/manifest.json")
    assert b"done in" not in manifest.read_bytes()
    assert b"1 steps up to date" in shell(file, "").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [PLAIN_C, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}]
)
def test_a_screen_without_utf_8_shows_question_marks(file, more):
    """In headlines, warnings and what a step prints; the log of the step has all of it."""
    done = shell(file, "", **more)
    assert done.returncode == 0, done.stderr
    shown = "3.1 ± 0.2 ? better" if "latin-1" in more.values() else "3.1 ? 0.2 ? better"
    assert shown.encode("latin-1") in done.stdout
    (log,) = file.parent.glob("runs/measure-*/attempts/*/log.txt")
    assert "careful → ±" in log.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "rows", "kind"), [(1, 1, "xterm"), (9, 9, "dumb")])
def test_a_narrow_terminal_ends_nothing(file, columns, rows, kind):
    """A run, its plan and the help of its settings."""
    for verb in ("run", "plan", "--help-settings"):
        command = [sys.executable, str(file), verb, "--prefix", str(file.parent / "runs")]
        command += ["--executor", "inline"]
        with Terminal(command, {"TERM": kind}, columns=columns, rows=rows) as terminal:
            assert terminal.wait(60) == 0, terminal.text


@pytest.mark.slow
def test_a_run_that_cannot_be_registered_leaves_the_terminal_as_it_was(file):
    """Its summary is the first file it writes; the cursor is shown again, the log closed."""
    (file.parent / "runs").mkdir()
    (file.parent / "runs" / "events").touch()
    command = [sys.executable, str(file), "run", "--prefix", str(file.parent / "runs")]
    with Terminal(command) as terminal:
        assert terminal.wait(60) == 1, terminal.text
    assert "error: " in terminal.text
    assert terminal.text.rfind("\x1b[?25h") >= terminal.text.rfind("\x1b[?25l")
