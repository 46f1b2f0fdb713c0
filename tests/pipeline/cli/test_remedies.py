"""What errors say to do: run exactly as printed, by a shell, it works."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

GRAPH = """
from pipeline import Experiment, Result, StepContext, named, step
from tests.pipeline.toy import Numbers, Order, Scale, Total, numbers, order, scaled, total

@step(output=Total, version=1)
def last(run: StepContext, order: Order, *, plus: int) -> Result:
    return {"total": sum(order.input("numbers", Numbers).values()) + plus}

def build(factor: int = 1, plus: int = 0):
    there = named(numbers(count=4), "it's [a, b]")
    return total(scaled(there, scale=Scale(factor))), last(order(there), plus=plus)

experiment = Experiment(build)
if __name__ == "__main__":
    experiment.main()
"""


def shell(command):
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def retry_of(output):
    (command,) = re.findall(r"^  retry: (.*)$", output, re.MULTILINE)
    return command


@pytest.fixture
def run(tmp_path):
    """The beginning of a command of an experiment that was run, in a store with a space."""
    file = tmp_path / "mine.py"
    file.write_text(GRAPH)
    command = f"{sys.executable} {file} --executor inline --prefix '{tmp_path}/my store'"
    status, output = shell(command)
    assert status == 0, output
    return command


def delete_a_file(output: Path) -> None:
    next(output.glob("attempts/*/shards/*/*/n.txt")).unlink()


def delete_the_output(output: Path) -> None:
    shutil.rmtree(output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "damage"),
    [("--factor 2", delete_a_file), ("--plus 3", delete_the_output)],
    ids=["read by a step", "opened and gone"],
)
def test_a_damaged_input_is_built_again_by_the_command_that_is_printed(run, tmp_path, flag, damage):
    """The step that reads it, directly or through another output, names the step that wrote it."""
    damage(next((tmp_path / "my store").glob("numbers-*")))
    status, output = shell(f"{run} {flag}")
    assert status == 1
    assert shell(f"{run} {flag}")[0] == 1
    command = retry_of(output)
    assert "--force" in command
    assert shlex.split(command)[-1] == "it's [a, b]", "this step, and no other"
    status, output = shell(command)
    assert status == 0, output
    assert shell(f"{run} {flag}")[0] == 0
