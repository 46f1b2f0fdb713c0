"""Which files a step consists of, against Python's own module finder, and what counts as change."""

from __future__ import annotations

import ast
import json
import modulefinder
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import steps
from pipeline.identity import source_code

ROOT = Path(__file__).parents[3]


PROJECT = {
    "acme/__init__.py": "",
    "acme/steps.py": '''"""Steps."""
from acme import shapes
import json, os

def build(run):
    from .inner.deep import (
        area,  # a comment with a ) in it
        side as edge,
    )
    return area(edge)
''',
    "acme/shapes.py": "import acme.numbers as n; from .extra import *\n",
    "acme/numbers.py": "ONE = 1\n",
    "acme/inner/__init__.py": "",
    "acme/inner/deep.py": '''from ..common import scale


def area(x):
    """The area."""
    return scale(x) * 2


side = 3
''',
    "acme/common.py": "from vendored.thing import x\n\n\ndef scale(x):\n    return x + 1\n",
    "acme/extra.py": "",
    "acme/unused.py": "",
    "vendored/thing.py": "x = 1\n",
}


REACHED = sorted(set(PROJECT) - {"acme/unused.py"})


def write(root: Path, files: dict[str, str]) -> None:
    """Files of a project."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def project(tmp_path):
    """A package whose step imports across it; returns its folder."""
    write(tmp_path, PROJECT)
    return tmp_path


def function_in(path: Path, module: str, name: str = "build"):
    """A function compiled from a file, without importing anything but that file's own code."""
    text = path.read_text()
    only = ast.parse(text)
    only.body = [n for n in only.body if isinstance(n, ast.FunctionDef) and n.name == name]
    space = {"__name__": module}
    exec(compile(only, str(path), "exec"), space)
    return space[name]


@pytest.fixture
def build(project):
    """The step function of the project."""
    return function_in(project / "acme/steps.py", "acme.steps")


def recorded(function) -> dict:
    """Digests as a manifest gives them back."""
    return json.loads(json.dumps(source_code.digests(function)))


def edit(path: Path, old: str, new: str) -> None:
    """Replace text that must be there once."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_running_the_step_loads_no_file_that_is_not_reached(project, build):
    """Python itself imports exactly the files that were found without importing."""
    code = (
        "import sys, acme.steps; acme.steps.build(None)\n"
        "for m in list(sys.modules.values()):\n"
        "    if str(getattr(m, '__file__', None)).startswith(sys.argv[1]): print(m.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(project)],
        capture_output=True,
        text=True,
        check=True,
        cwd=project,
    )
    found = [str(project / name) for name in source_code.digests(build)]
    assert sorted(done.stdout.split()) == sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evaluate", "tokenize"])
def test_the_steps_of_the_library_reach_what_modulefinder_finds(name):
    """Python's own static finder, which reads bytecode, agrees on the real steps."""
    declared = getattr(steps, name)
    module = declared.function.__module__
    finder = modulefinder.ModuleFinder(path=[str(ROOT)])
    finder.import_hook(module)
    expected = {
        str(Path(m.__file__).relative_to(ROOT))
        for m in finder.modules.values()
        if m.__file__ and not m.__name__.startswith("pipeline")
    }
    found = set(source_code.digests(declared))
    assert found == expected
    assert f"{module.replace('.', '/')}.py" in found


@pytest.mark.slow
def test_finding_the_files_imports_nothing():
    """No module but this one's own needs is loaded by it."""
    code = (
        "import sys; from steps.training.train import train; before = set(sys.modules)\n"
        "from pipeline.identity import source_code; assert len(source_code.digests(train)) > 20\n"
        "assert source_code.changed(train, {'a.py': ['', '']})\n"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert set(done.stdout.split()) <= {"pipeline", *sys.stdlib_module_names}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""The area."""', '"""The area, of a square."""'),
        ('    """The area."""\n', ""),
        ("return scale(x) * 2", "return (scale( x )\n        * 2)  # twice"),
        ("side = 3", "\n\n# The side.\nside = 3"),
        ("side = 3", 'side = 3\n"""The side."""'),
        ("from ..common import scale", "from ..common import (\n    scale,\n)"),
    ],
)
def test_comments_docstrings_and_layout_are_no_change(project, build, old, new):
    """The bytes differ, the meaning does not."""
    then = recorded(build)
    edit(project / "acme/inner/deep.py", old, new)
    assert source_code.digests(build)["acme/inner/deep.py"].raw != then["acme/inner/deep.py"][0]
    assert source_code.changed(build, then) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("* 2", "* 2.0"),
        ("* 2", "** 2"),
        ("side = 3", "side = '3'"),
        ("side = 3", "side = None"),
        ("def area(x):", "def area(x, /):"),
        ("def area(x):", "def area(x=None):"),
        ("def area(x):", "async def area(x):"),
        ("side = 3", "if True:\n    side = 3"),
        ("* 2\n\n\nside = 3", "* 2\n    side = 3"),
        ('"""The area."""', "3"),
    ],
)
def test_every_other_edit_is_a_change(project, build, old, new):
    """Operators, constants and their types, signatures, nesting."""
    then = recorded(build)
    edit(project / "acme/inner/deep.py", old, new)
    assert source_code.changed(build, then) == ["acme/inner/deep.py"]


def test_a_moved_file_is_seen_in_both_places(project, build):
    """The old name and the new one, and the file that names it."""
    then = recorded(build)
    (project / "acme/numbers.py").rename(project / "acme/counts.py")
    edit(project / "acme/shapes.py", "acme.numbers", "acme.counts")
    assert source_code.changed(build, then) == [
        "acme/counts.py",
        "acme/numbers.py",
        "acme/shapes.py",
    ]


def test_a_new_module_under_an_old_import_is_seen(project, build):
    """`from acme import shapes` finds the package once there is one, with no edit elsewhere."""
    then = recorded(build)
    write(project, {"acme/shapes/__init__.py": "WIDE = 1\n"})
    assert "acme/shapes/__init__.py" in source_code.changed(build, then)


def test_a_file_that_does_not_parse_is_compared_by_its_bytes(project, build):
    """Not an error, and every edit of it counts."""
    path = project / "acme/numbers.py"
    path.write_text("def broken(:\n")
    then = recorded(build)
    assert then["acme/numbers.py"][0] == then["acme/numbers.py"][1]
    assert source_code.changed(build, then) == []
    path.write_text("def broken(:\n# comment\n")
    assert source_code.changed(build, then) == ["acme/numbers.py"]


@pytest.mark.parametrize("data", [b"x = '\xff'\n", b"x = 1\0\n", b"", b"\xef\xbb\xbfx = 1\n"])
def test_odd_bytes_have_a_digest(project, build, data):
    """Bad encodings, NUL, nothing, a byte order mark."""
    (project / "acme/numbers.py").write_bytes(data)
    then = recorded(build)
    assert len(then["acme/numbers.py"][0]) == len(then["acme/numbers.py"][1]) == 16
    assert source_code.changed(build, then) == []


def test_a_step_in_a_script_reaches_what_lies_beside_it_and_above(tmp_path):
    """A file run as a script: its neighbours by bare name, and packages beside its own."""
    write(
        tmp_path,
        {
            "lab/__init__.py": "",
            "lab/run.py": "def build(run):\n    import helper, acme.numbers\n",
            "lab/helper.py": "",
            "acme/__init__.py": "",
            "acme/numbers.py": "",
            "helper.py": "raise SystemExit('the other one')\n",
        },
    )
    space = runpy.run_path(str(tmp_path / "lab/run.py"), run_name="__main__")
    assert list(source_code.digests(space["build"])) == [
        *("acme/__init__.py", "acme/numbers.py", "lab/__init__.py", "lab/helper.py", "lab/run.py")
    ]


def test_a_script_of_a_user_reaches_the_library_of_the_checkout(tmp_path):
    """A user's own file outside the checkout, importing the training loop."""
    write(tmp_path, {"mine.py": "def build(run):\n    import training.trainer.trainer, helper\n"})
    write(tmp_path, {"helper.py": ""})
    names = set(source_code.digests(function_in(tmp_path / "mine.py", "__main__")))
    assert {"mine.py", "helper.py", "training/trainer/trainer.py", "training/__init__.py"} <= names


def test_an_installed_package_reaches_itself_and_none_of_its_neighbours(tmp_path):
    """Beside a package in site-packages lies everybody else's code."""
    root = tmp_path / "site-packages"
    write(root, {"acme/__init__.py": "", "acme/a.py": "def build(run):\n    import jax, acme.b\n"})
    write(root, {"acme/b.py": "", "jax/__init__.py": ""})
    found = source_code.digests(function_in(root / "acme/a.py", "acme.a"))
    assert list(found) == ["acme/__init__.py", "acme/a.py", "acme/b.py"]


def test_imports_in_a_circle_end(project, build):
    """Two modules that import each other are each reached once."""
    (project / "acme/numbers.py").write_text("from acme import shapes\nfrom acme import steps\n")
    assert list(source_code.digests(build)) == REACHED


def test_what_is_no_file_has_no_sources():
    """Builtins and functions typed in reach nothing and never count as changed."""
    space = {"__name__": "__main__"}
    exec("def build(run): pass", space)
    for function in (len, space["build"]):
        assert source_code.digests(function) == {}
        assert source_code.changed(function, {"a.py": ["0", "1"]}) == []


@pytest.mark.parametrize("bad", [None, [], ["a"], "ab", 7, {"raw": "x"}])
def test_a_record_that_is_none_of_ours_counts_as_changed(build, bad):
    """A foreign entry is named, not an exception."""
    then = recorded(build)
    then["acme/common.py"] = bad
    assert source_code.changed(build, then) == ["acme/common.py"]


def test_a_thousand_questions_scan_each_file_once(build, monkeypatch):
    """Work grows with the files, not with the steps of a graph."""
    seen = []
    real = source_code.SourceFile
    monkeypatch.setattr(source_code, "SourceFile", lambda data: seen.append(data) or real(data))
    source_code._files.clear()
    source_code._walks.clear()
    then = recorded(build)
    for _ in range(1000):
        assert source_code.changed(build, then) == []
    assert len(seen) == len(REACHED)


def test_a_star_reaches_the_submodules_that_it_may_bring(project, build):
    """`from acme.inner import *` imports what `__all__` names, which only running could tell."""
    write(project, {"acme/inner/__init__.py": "__all__ = ['late']\n", "acme/inner/late.py": ""})
    edit(project / "acme/common.py", "from vendored.thing import x", "from acme.inner import *")
    assert "acme/inner/late.py" in source_code.digests(build)


MEANS = '''"""Doc."""
class A(B, c=1):
    x: int = -1.5e3
    async def f(self, a, /, *b, d=None, **k):
        return f"{a:<{d}}  {b!r}" + u"x" f"" + f"{{{d}}}"
@deco
def g(): "doc"; yield from (i for i in {**k, 1: ...} if i)
match x:
    case [1, *rest] | {"a": None}: lambda *, q: b"\\xff"
'''


def test_the_meaning_is_the_same_in_every_version_of_python(project, build):
    """One version builds, another compares: the digest is what 3.11, 3.12 and 3.13 say."""
    (project / "acme/numbers.py").write_text(MEANS)
    assert source_code.digests(build)["acme/numbers.py"].meaning == "7121e9181d1fdb31"
