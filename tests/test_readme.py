"""Every command in the README runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for line in block.splitlines()
]
# `make demo` is its recipe on a short run; `make test` is the suite this test is part of; the run
# on a slice needs a slice, so its flags are checked by planning with them.
REWRITTEN = {
    "make demo": "python experiments/run_200m.py --preset smoke --executor inline --train.steps 5",
    "make test": "make --dry-run test",
}


def test_the_readme_has_commands():
    """The pattern that finds commands finds them."""
    assert len(COMMANDS) >= 7
    assert "make demo" in COMMANDS
    assert "make test" in COMMANDS


def runnable(line: str) -> str:
    """The command as this machine can run it."""
    if "--cluster" in line:
        for old in ("--cluster auto", "--prefix gs://my-bucket/runs"):
            line = line.replace(old, "")
        return line.replace("run_200m.py", "run_200m.py plan --cluster auto")
    return REWRITTEN.get(line, line)


def test_the_makefile_runs_what_the_readme_says():
    """`make demo` is the smoke preset of the 200M experiment."""
    dry = subprocess.run(
        ["make", "--dry-run", "demo"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "experiments/run_200m.py --preset smoke" in dry.stdout


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_readme_commands_run(line, tmp_path):
    """Each command exits with 0, in a store of its own."""
    binaries = str(Path(sys.executable).parent)
    line = runnable(line).replace(".venv/bin/", "")
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PONENTE_PREFIX": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "run_200m.py" in line:
        assert "report" in done.stdout
