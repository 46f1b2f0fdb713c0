"""The architecture, held: who imports whom, what planning must not import, sizes and names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pipeline", "steps", "data", "models", "training", "experiments")
EDGE = {
    "pipeline.store.append",
    "pipeline.store.decode",
    "pipeline.store.parallel",
    "pipeline.store.retry",
    "pipeline.store.storage",
    "pipeline.errors",
    "pipeline.accelerators",
    "pipeline.identity.fingerprint",
    "pipeline.identity.listing",
}
ALLOWED = {
    "pipeline": set(),
    "data": set(),
    "models": set(),
    "training": {"models", "data"},
    "steps": {"pipeline", "data", "models", "training"},
    "experiments": {"pipeline", "steps", "data", "models", "training"},
}
MACHINE_LEARNING = {"jax", "haliax", "equinox", "optax", "orbax", "tensorstore", "tokenizers"}


def imports(source: str) -> set[str]:
    """Dotted names of everything a source text imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def violations(package: str, source: str) -> list[str]:
    """Imports of our own packages that `package` may not make."""
    wrong = []
    for name in imports(source):
        top = name.split(".")[0]
        if top in ("tests", *PACKAGES) and top != package and top not in ALLOWED[package]:
            edge = any(name == e or name.startswith(e + ".") for e in EDGE)
            if not (package in ("data", "models", "training") and edge):
                wrong.append(name)
        if package == "pipeline" and top in MACHINE_LEARNING | {"numpy"}:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package):
    """experiments -> steps -> {data, models, training -> {models, data}}; steps -> pipeline."""
    for path in (ROOT / package).rglob("*.py"):
        assert violations(package, path.read_text()) == [], path


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("data", "from models.shape.config import TransformerConfig"),
        ("models", "import training.trainer.trainer"),
        ("training", "from pipeline.graph.step_context import StepContext"),
        ("pipeline", "import numpy as np"),
        ("steps", "from experiments import run_200m"),
        ("data", "def f():\n    from steps import sample"),
    ],
)
def test_the_import_check_can_fail(package, line):
    """Each kind of forbidden import is seen."""
    assert violations(package, line)


FLOORS = {
    "pipeline": (
        *("errors", "events", "accelerators", "identity", "store", "prices", "graph", "plan"),
        *(
            "execute",
            "sweep",
            "pages",
            "holders",
            "doctor",
            "launch",
            "cli",
            "experiment",
            "__init__",
        ),
    ),
    "steps": (
        *("platforms", "measured", "artifacts", "gang", "declared", "checkpoints", "documents"),
        *("tokens", "scaling_law", "training", "pages", "evaluation", "exchange", "tuning", "dial"),
        *("rewind", "cli", "__init__"),
    ),
    "data": (
        *("arrays", "sources", "source", "read", "tokenizer", "select", "prepare"),
        *("cache", "batches", "chat", "__init__"),
    ),
    "models": (
        *("named", "jax_versions", "jax_numerics", "shape", "config", "presets"),
        *("layers", "attention", "transformer", "loss", "generate", "hf", "__init__"),
    ),
    "training": (
        *("config", "recipes", "sharding", "parameter_roles", "optimizer", "cost", "step"),
        *("preflight", "checkpoint", "fault", "metrics", "evaluate", "trainer", "__init__"),
    ),
}
"""Folders, and files beside them, of a package; each imports only what stands before it.
"""


def climbs(package: str, module: str, source: str) -> list[str]:
    """Imports in a module of a package from a floor above its own."""
    floors = FLOORS[package]

    def floor(name: str) -> int:
        second = [*name.split("."), "__init__"][1]
        return floors.index(second if second in floors else "__init__")

    inside = (name for name in imports(source) if name.split(".")[0] == package)
    return [name for name in inside if floor(name) > floor(module)]


@pytest.mark.parametrize("package", FLOORS)
def test_folders_import_only_what_is_below_them(package):
    """No import goes up, so none goes in a circle between folders."""
    for path in (ROOT / package).rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        assert climbs(package, module, path.read_text()) == [], path


@pytest.mark.parametrize(
    ("package", "module", "line"),
    [
        ("pipeline", "pipeline.store.gc", "from pipeline.graph.step import Node"),
        ("pipeline", "pipeline.graph.step", "import pipeline.cli.run"),
        ("pipeline", "pipeline.plan.state", "from pipeline import Artifact"),
        ("steps", "steps.checkpoints.find", "from steps.training.train import train"),
        ("data", "data.read.listing", "from data.select.duplicates import find_duplicates"),
        ("training", "training.step.program", "from training.evaluate.evaluator import evaluate"),
        ("models", "models.attention.splash", "from models.transformer import Transformer"),
    ],
)
def test_the_check_of_folders_can_fail(package, module, line):
    """An import of a folder above, of a file, and of the package itself are seen."""
    assert climbs(package, module, line)


def in_circles(package: str, root: Path = ROOT) -> list[str]:
    """Modules of a package that import each other in a circle, and what imports those."""
    paths = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (root / package).rglob("*.py")
    }
    edges = {}
    for module, path in paths.items():
        names = imports(path.read_text())
        found = {name if name in paths else name.rpartition(".")[0] for name in names}
        edges[module] = (found & paths.keys()) - {module}
    left = dict(edges)
    # What imports nothing that is left cannot be in a circle.
    while free := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    return sorted(left)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_by_way_of_others(package):
    """Also not inside a function or for a type checker alone."""
    assert in_circles(package) == []


def test_the_check_of_circles_can_fail(tmp_path):
    """Two modules that import each other are seen, a module that is imported by both is not."""
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "a.py").write_text("def f():\n    from house.b import g\n")
    (tmp_path / "house" / "b.py").write_text("import house.c\nfrom house import a\n")
    (tmp_path / "house" / "c.py").write_text("")
    assert in_circles("house", tmp_path) == ["house.a", "house.b"]


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_one_module_imports_haliax(package):
    """Both packages of that name are development wheels: a break must be mended in one place."""
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / package).rglob("*.py")
        if any(name.split(".")[0] == "haliax" for name in imports(path.read_text()))
    }
    assert found == ({"models/named.py"} if package == "models" else set())


def loaded_by(code: str) -> set[str]:
    """Top-level modules loaded after running `code` in a new process."""
    script = f"{code}\nimport sys; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.splitlines()[-1].split())


def test_planning_the_200m_run_imports_no_machine_learning(tmp_path):
    """`plan` of the real experiment: no jax, no numpy, no ray."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['run_200m.py', 'plan', '--prefix', {str(tmp_path)!r}]\n"
        "try: runpy.run_path('experiments/run_200m.py', run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0"
    )
    heavy = {*MACHINE_LEARNING, "numpy", "pyarrow", "ray", "matplotlib"}
    assert loaded_by(code) & heavy == set()


def test_the_shape_of_a_model_imports_no_jax():
    """What planning asks of a model's shape costs no import of JAX."""
    names = [f"models.shape.{path.stem}" for path in (ROOT / "models/shape").glob("[!_]*.py")]
    names += ["models.config", "models.presets"]
    loaded = loaded_by("".join(f"import {name}\n" for name in names))
    assert loaded.isdisjoint({"jax", "haliax", "numpy"})


def test_the_planning_check_can_fail():
    """A module that is loaded is seen."""
    assert "numpy" in loaded_by("import numpy")


def sources() -> list[Path]:
    """Every Python file that belongs to the project."""
    return [p for top in (*PACKAGES, "tests") for p in (ROOT / top).rglob("*.py")]


def test_no_module_is_named_like_one_of_pythons():
    """A file `tokenize.py` beside a script would shadow the standard library's."""
    names = {path.stem for path in sources()} | set(PACKAGES)
    assert names & set(sys.stdlib_module_names) - {"__init__"} == set()


def test_files_and_functions_stay_small():
    """No file above 400 lines, no function of ours above 80."""
    for path in sources():
        text = path.read_text()
        assert text.count("\n") <= 400, path
        if "tests" not in path.parts:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    length = (node.end_lineno or 0) - node.lineno + 1
                    assert length <= 80, f"{path}:{node.name} has {length} lines"


def test_no_source_file_is_ignored_by_git():
    """Ray honours .gitignore when it ships code, so an ignored package would be missing there."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    paths = [str(p.relative_to(ROOT)) for p in sources()]
    asked = subprocess.run(
        ["git", "check-ignore", "--no-index", *paths], capture_output=True, text=True, cwd=ROOT
    )
    assert asked.stdout == ""


def test_every_package_is_an_ordinary_one():
    """A package without __init__.py loses to any folder of the same name."""
    for path in sources():
        assert (path.parent / "__init__.py").exists(), path.parent
