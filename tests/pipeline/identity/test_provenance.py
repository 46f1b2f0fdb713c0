"""Where an output came from: what is collected, and that it is enough to have the code again."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import types
from pathlib import Path

import pytest

from pipeline.graph.step import as_node
from pipeline.identity import provenance
from pipeline.store import manifest, storage
from tests.pipeline.helpers import bring_up
from tests.pipeline.toy import numbers, total

SECRET = "hunter2"


def git(root: Path, *arguments: str) -> str:
    """A git command in a repository without an owner."""
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=false"]
    command = ["git", "-C", str(root), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def repository(tmp_path):
    """A repository with a commit, and changes of every kind since."""
    root = tmp_path / "mine"
    root.mkdir()
    git(root, "init", "-q")
    (root / "changed.py").write_text("one = 1\n")
    (root / "removed.py").write_text("two = 2\n")
    (root / "notes.md").write_text("notes\n")
    (root / ".gitignore").write_text("secret.py\n*.env\n")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    (root / "changed.py").write_text("one = 11\n")
    (root / "removed.py").unlink()
    (root / "notes.md").write_text("other notes\n")
    (root / "staged.py").write_text("three = 3\n")
    git(root, "add", "staged.py")
    (root / "inner").mkdir()
    (root / "inner" / "new file.py").write_text("four = 'ä'\n\nno_newline = 4")
    (root / "empty.py").write_text("")
    (root / "secret.py").write_text(f"password = '{SECRET}'\n")
    (root / "data.txt").write_text("untracked, and no code\n")
    return root


def function_in(path: Path) -> types.FunctionType:
    """A function whose code is in the file."""
    path.write_text(path.read_text() + "\n\ndef body(run):\n    return {}\n")
    space: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    return space["body"]


def test_commit_and_patch_bring_the_code_back(repository, tmp_path):
    """Applied to a clone of the commit, the patch gives every file that is not ignored or data."""
    body = function_in(repository / "changed.py")
    found = provenance.collect([body])
    assert git(repository, "rev-parse", "HEAD").strip() in found.record["git"]["commit"]
    assert len(found.record["git"]["uncommitted"]) == 64
    start = found.diff.index("# mine at ")
    rest = found.diff[start:].split("\n# ", 1)[0]
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    (tmp_path / "diff").write_text(rest)
    git(clone, "apply", str(tmp_path / "diff"))
    here = {p.relative_to(repository): p.read_bytes() for p in files(repository)}
    assert {p.relative_to(clone): p.read_bytes() for p in files(clone)} == {
        path: data for path, data in here.items() if path.name not in ("secret.py", "data.txt")
    }
    assert SECRET not in rest


def files(root: Path) -> list[Path]:
    """Every file outside of git's own."""
    return [p for p in root.rglob("*") if p.is_file() and ".git" not in p.parts]


def test_packages_are_those_that_the_project_asks_for(monkeypatch):
    """By name from the project's own metadata; and a digest that any installed version changes."""
    record = provenance.collect([]).record
    assert record["packages"]["fsspec"] == importlib.metadata.version("fsspec")
    assert "pytest" in record["packages"], "an optional dependency that is installed"
    everything = list(importlib.metadata.distributions())
    fewer = [d for d in everything if d.name != everything[0].name]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: iter(fewer))
    assert provenance.collect([]).record["installed"] != record["installed"]


def test_a_worker_records_the_variables_that_its_step_names(monkeypatch):
    """And no other one."""
    monkeypatch.setenv("XLA_FLAGS", "--a")
    monkeypatch.setenv("TOKEN", SECRET)
    record = provenance.of_worker(("XLA_FLAGS", "NOT_SET"))
    assert record["flags"] == {"XLA_FLAGS": "--a"}
    assert SECRET not in str(record)


def test_the_driver_collects_once_and_workers_never_ask_git(tmp_path, monkeypatch):
    """Every manifest of a run has the driver's commit, and refers to one stored diff."""
    asked = []
    real = provenance.collect

    def collect(functions):
        asked.append(1)
        found = real(functions)
        return provenance.RunProvenance({**found.record, "git": {"commit": "c"}}, "the diff")

    monkeypatch.setattr(provenance, "collect", collect)
    store, wanted = str(tmp_path), total(numbers(count=4))
    bring_up(store, wanted)
    assert asked == [1]
    for node in (as_node(wanted), *as_node(wanted).inputs.values()):
        found = manifest.load(storage.join(store, node.directory))
        assert found is not None
        assert found.provenance["git"] == {"commit": "c"}
        assert found.provenance["diff"] == "events/test.diff"
        assert found.provenance["sources"]
    assert storage.read_bytes(storage.join(store, "events/test.diff")) == b"the diff"
    bring_up(store, wanted)
    assert asked == [1], "nothing ran, nothing was asked"


def test_code_that_left_its_git_directory_behind_says_what_git_said(repository, tmp_path):
    """`ship` writes commit and patch into the copy; the driver there records them."""
    copy = tmp_path / "copy"
    shutil.copytree(repository, copy, ignore=shutil.ignore_patterns(".git"))
    there = function_in(repository / "changed.py")
    provenance.ship(str(repository), str(copy))
    shutil.copy(repository / "changed.py", copy / "changed.py")
    here, found = (
        provenance.collect([there]),
        provenance.collect([function_in(copy / "changed.py")]),
    )
    head = git(repository, "rev-parse", "HEAD").strip()
    assert head in found.record["git"]["commit"]
    assert "problem" not in found.record["git"]
    assert "+one = 11" in found.diff
    assert "changed.py" in here.diff


def test_what_git_cannot_tell_is_unknown_with_the_reason(repository, monkeypatch, tmp_path):
    """No repository, no git, a repository of somebody else, a damaged record: never "committed"."""

    def told(folder):
        path = folder / "code.py"
        path.write_text("")
        return provenance.collect([function_in(path)]).record["git"]

    alone = tmp_path / "alone"
    alone.mkdir()
    found = told(alone)
    assert provenance.UNKNOWN in found["commit"]
    assert found["uncommitted"] == provenance.UNKNOWN
    assert "not a git repository" in found["problem"]
    (alone / provenance.SHIPPED).write_text('{"commit": 3, "uncommitted": ""}')
    assert "not readable" in told(alone)["problem"]
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert "dubious ownership" in told(repository)["problem"]
    monkeypatch.setenv("PATH", "")
    found = told(repository)
    assert found["commit"] == found["uncommitted"] == provenance.UNKNOWN
    assert "FileNotFoundError" in found["problem"]
