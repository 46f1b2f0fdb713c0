"""`make setup` takes the newest supported Python; an older one is refused before anything else."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`make setup` in a folder with our Makefile, where no registry answers."""
    for name in ("Makefile", "pyproject.toml", "constraints-oldest.txt", "constraints-newest.txt"):
        shutil.copy(ROOT / name, folder)
    chosen = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "PYTHON", "STACK")  # of a make around this
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    environment |= {"PIP_NO_INDEX": "1", "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["make", "setup", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def python(path: Path, version: str) -> Path:
    """A program that answers as a Python of this version, which makes environments of itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    venv = 'case "$*" in *venv*) mkdir -p .venv/bin; cp "$0" .venv/bin/python;; esac'
    path.write_text(f"#!/bin/sh\n{venv}\necho {version}\n")
    path.chmod(0o755)
    return path


def test_an_old_python_is_refused_before_anything_is_made(tmp_path):
    """With the versions that do, and the command."""
    done = make(tmp_path, f"PYTHON={python(tmp_path / 'python3.10', '3.10')}")
    assert done.returncode != 0
    assert "is Python 3.10; ponente needs 3.11 to 3.14: make setup PYTHON=python3.11" in done.stderr
    assert not (tmp_path / ".venv").exists()
    done = make(tmp_path, f"PYTHON={python(tmp_path / 'python3.11', '3.11')}", "STACK=newest")
    assert "needs 3.12 to 3.14: make setup PYTHON=python3.12" in done.stderr
    done = make(tmp_path, "PYTHON=no-such-python")
    assert "no-such-python" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_an_environment_of_another_python_is_made_again(tmp_path):
    """It is what a set-up that failed has left; one of the same Python stays."""
    there = python(tmp_path / ".venv" / "bin" / "python", "3.10")
    kept = tmp_path / ".venv" / "kept"
    kept.touch()
    new = python(tmp_path / "python3.12", "3.12")
    make(tmp_path, f"PYTHON={new}")  # ends at uv, for want of a registry
    assert there.read_text() == new.read_text()
    assert not kept.exists()
    kept.touch()
    make(tmp_path, f"PYTHON={new}")
    assert kept.exists()


def test_the_newest_python_of_the_path_is_taken(tmp_path):
    """One that does not start, such as a shim, is passed over; PYTHON and STACK choose others."""
    (tmp_path / "python3.14").write_text("#!/bin/sh\nexit 127\n")
    (tmp_path / "python3.14").chmod(0o755)
    for version in ("3.13", "3.12", "3.11"):
        python(tmp_path / f"python{version}", version)
    done = make(tmp_path, "--dry-run")
    assert "python3.13 -m venv .venv" in done.stdout
    oldest = make(tmp_path, "--dry-run", "PYTHON=python3.11", "STACK=oldest").stdout
    assert "python3.11 -m venv .venv" in oldest
    assert "-c constraints-oldest.txt" in oldest
