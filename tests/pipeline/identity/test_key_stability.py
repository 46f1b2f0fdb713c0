"""What may be edited without orphaning a store: a small package is, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.graph.order import topological
from pipeline.graph.step import as_node

ROOT = Path(__file__).parents[3]

CONFIG = """
import dataclasses, enum
from typing import Annotated
from pipeline import Runtime

class Kind(enum.Enum):
    FAST = "fast"

@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 0.1

@dataclasses.dataclass(frozen=True)
class Shape:
    width: int
    kind: Kind = Kind.FAST
    inner: Inner = Inner()
    log_every: Annotated[int, Runtime] = 1
"""
STEPS = """
from pipeline import Artifact, Result, StepContext, step
from acme.config import Inner, Kind, Shape

class Thing(Artifact):
    pass

@step(output=Thing, version=1)
def source(run: StepContext, *, shape: Shape, names: frozenset[Inner] = frozenset()) -> Result:
    return {}

@step(output=Thing, version=1)
def user(run: StepContext, thing: Thing, *, count: int = 3) -> Result:
    return {}
"""
GRAPH = """
from acme.config import Inner, Kind, Shape
from acme.steps import source, user

def graph():
    names = frozenset({Inner(0.5), Inner(), Inner(0.2)})
    return user(source(shape=Shape(width=4, inner=Inner(0.2)), names=names))
"""
SCRIPT = """
import importlib, json, sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
graph = importlib.import_module(sys.argv[3]).graph
print(json.dumps([node.directory for node in topological([as_node(graph())])]))
"""


class Package:
    """A copy of the package, with edits."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {"config.py": CONFIG, "steps.py": STEPS, "graph.py": GRAPH, "__init__.py": ""}

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace text that must be there."""
        assert old in self.files[name]
        self.files[name] = self.files[name].replace(old, new)

    def ask(self, package: str = "acme") -> subprocess.CompletedProcess[str]:
        """Directories of its graph's nodes, computed by a new process."""
        folder = self.root / package
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (folder / name).write_text(text.replace("acme", package))
        command = [sys.executable, "-c", SCRIPT, str(ROOT), str(self.root), f"{package}.graph"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def keys(self, package: str = "acme") -> list[str]:
        """As `ask`, when that works."""
        done = self.ask(package)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def package(tmp_path):
    return Package(tmp_path / "edited")


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    return Package(tmp_path_factory.mktemp("first")).keys()


def test_a_renamed_package_keeps_its_keys(package, before):
    """Modules are no part of the names of steps and classes."""
    assert package.keys("renamed") == before


def test_moved_classes_keep_keys(package, before):
    """Every class of the configuration moves to another module."""
    package.files["elsewhere.py"] = package.files.pop("config.py")
    for name in ("steps.py", "graph.py"):
        package.edit(name, "acme.config", "acme.elsewhere")
    assert package.keys() == before


def test_new_fields_and_arguments_with_a_default_keep_keys(package, before):
    """Of a class, of one nested in it and in a set, and of a step; None is a default too."""
    package.edit("config.py", "    width: int\n", "    width: int\n    depth: int = 7\n")
    package.edit("config.py", "rate: float = 0.1", "rate: float = 0.1\n    also: str | None = None")
    package.edit("config.py", "class Inner:\n", "class Inner:\n    # Sorts before `rate`.\n")
    package.edit("steps.py", "count: int = 3", "count: int = 3, more: tuple[int, ...] = ()")
    assert package.keys() == before


@pytest.mark.parametrize(
    ("old", "new"), [("width=4", "width=4, depth=8"), ("user(source", "user(count=4, thing=source")]
)
def test_a_value_that_is_not_the_default_changes_keys(package, before, old, new):
    """Of a field that was added, and of an argument that was always there."""
    package.edit("config.py", "    width: int\n", "    width: int\n    depth: int = 7\n")
    package.edit("graph.py", old, new)
    assert package.keys()[-1] != before[-1]


@pytest.mark.slow
def test_a_renamed_class_and_step_keep_keys_under_their_explicit_names(package, before):
    """`identity_name` and `@step(name=...)`; without them the keys are others."""
    package.edit("config.py", "Shape", "Form")
    package.edit("graph.py", "Shape", "Form")
    package.edit("steps.py", "Shape", "Form")
    package.edit("steps.py", "def source", "def origin")
    package.edit("graph.py", "source", "origin")
    assert set(package.keys()).isdisjoint(before)
    package.edit("config.py", "class Form:", 'class Form:\n    identity_name: ClassVar = "Shape"')
    package.edit("config.py", "import Annotated", "import Annotated, ClassVar")
    package.edit(
        "steps.py",
        "@step(output=Thing, version=1)\ndef origin",
        '@step(name="source", output=Thing, version=1)\ndef origin',
    )
    assert package.keys() == before


def test_two_classes_of_one_name_are_refused(package):
    """In one graph, though in configurations of different steps; both and the remedy are named."""
    package.files["other.py"] = package.files["config.py"]
    package.edit(
        "steps.py", "from pipeline", "from acme.other import Inner as Second\nfrom pipeline"
    )
    package.edit("steps.py", "count: int = 3", "inner: Second = Second(0.3)")
    done = package.ask()
    last = done.stderr.splitlines()[-1]
    assert done.returncode != 0
    for part in ("acme.config.Inner", "acme.other.Inner", "identity_name"):
        assert part in last


def test_a_file_that_is_executed_twice_declares_the_same_steps(tmp_path):
    """As when a file is run as a script and imported by another one."""
    file = tmp_path / "twice.py"
    steps = STEPS.replace("from acme.config import Inner, Kind, Shape", "")
    file.write_text(CONFIG + steps)
    nodes, modules = [], []
    for name in ("first_time", "second_time"):
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        modules.append(module)
        nodes.append(as_node(module.source(shape=module.Shape(width=4))))
    assert modules[0].Shape is not modules[1].Shape
    assert len(topological(nodes)) == 1
