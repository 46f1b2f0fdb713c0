"""A user's code beside the engine's: common names work, or are told in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import text_of

PONENTE = Path(sys.executable).parent / "ponente"
MINE = """
import steps
from pipeline import Artifact, Experiment, Result, StepContext, step
from models.shape.config import TransformerConfig
import helper

@step(output=Artifact, version=1)
def first(run: StepContext, *, n: int) -> Result:
    import data.read, training.config
    return {"twice": helper.twice(n)}

def mine(n: int = 2) -> Artifact:
    return first(n=n)

experiment = Experiment(mine)
if __name__ == "__main__":
    experiment.main()
"""
FORMS = {
    "ponente": [str(PONENTE), "run", "mine.py", "--executor", "inline"],
    "python": [sys.executable, "mine.py", "run", "--executor", "inline"],
    "cell": [sys.executable, "-c", "import mine; mine.experiment.run(executor='inline')"],
    "ray": [str(PONENTE), "run", "mine.py", "--executor", "ray"],
}


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "helper.py").write_text("def twice(n): return 2 * n\n")
    return tmp_path


def package(project: Path, name: str) -> None:
    (project / name).mkdir()
    (project / name / "__init__.py").write_text("")
    (project / name / "net.py").write_text("class Net: pass\n")


def run(project: Path, form: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        FORMS[form], cwd=project, env={**os.environ, **more}, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ponente", "python", "cell"])
def test_folders_and_packages_of_common_names_disturb_nothing(project, form):
    for name in ("data", "models"):
        package(project, name)
    (project / "training.py").write_text("1 / 0\n")
    (project / "experiments").mkdir()
    done = run(project, form)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("ponente", "error: mine.py:5: ModuleNotFoundError: no 'models.net' in ponente's package"),
        ("python", "ModuleNotFoundError: no 'models.net' in ponente's package 'models', which"),
    ],
)
def test_a_module_that_ours_hides_is_named(project, form, line):
    package(project, "models")
    (project / "mine.py").write_text(MINE.replace("helper\n", "helper, models.net\n", 1))
    done = run(project, form)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(line)
    assert f"hides {project}/models/__init__.py; rename that one" in done.stderr
    assert not (project / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("use", ["from steps import twice", "import steps; steps.twice"])
def test_a_name_of_a_module_that_ours_hides_is_explained(project, use):
    """Also where the user's module is a file, so that no submodule is missing."""
    (project / "steps.py").write_text("def twice(n): return 2 * n\n")
    (project / "mine.py").write_text(f"{use}\n{MINE}")
    done = run(project, "ponente")
    assert done.returncode == 1
    says = f"ponente's package 'steps' hides {project}/steps.py; rename that one"
    assert done.stderr.rstrip().endswith(says)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [("steps", "cell"), ("pipeline", "python")])
def test_a_module_that_hides_ours_is_named(project, name, form):
    (project / f"{name}.py").write_text("mine = 1\n")
    done = run(project, form)
    assert done.returncode == 1
    says = f"ImportError: {project}/{name}.py hides ponente's package '{name}'; rename it"
    assert done.stderr.splitlines()[-1] == says
    assert run(project, "ponente").returncode == 0, "which finds ours"


@pytest.mark.slow
def test_on_ray_ours_are_found_first_too(project):
    """Workers import from the current folder before all others."""
    for name in ("data", "models", "steps"):
        package(project, name)
    done = run(project, "ray")
    assert done.returncode == 0, done.stderr
    (project / "pipeline.py").write_text("")
    done = run(project, "ray", PONENTE_PREFIX="other")
    assert done.returncode == 1
    assert f"{project}/pipeline.py hides ponente's package 'pipeline'" in done.stderr


@pytest.mark.slow
def test_a_users_modules_reach_workers_from_another_folder(project, tmp_path_factory):
    """They are sent by value, so that a worker needs no file of theirs."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    command = [str(PONENTE), "run", str(project / "mine.py"), "--executor", "ray"]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_text_of_an_error_is_plain():
    error = RuntimeError("\x1b[36mray::sample()\x1b[39m failed\n   f(x)\n   ^^^~~^\nat last")
    assert text_of(error) == "ray::sample() failed f(x) at last"
