"""What errors say to do: run exactly as printed, by a shell, it works."""

from __future__ import annotations

import re
import shlex
import shutil
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
"""


def delete_a_file(output: Path) -> None:
    next(output.glob("attempts/*/shards/*/*/n.txt")).unlink()


def delete_the_output(output: Path) -> None:
    shutil.rmtree(output)


@pytest.mark.parametrize(
    ("flag", "damage"),
    [("--factor", delete_a_file), ("--plus", delete_a_file), ("--plus", delete_the_output)],
    ids=["read by a step", "opened", "opened and gone"],
)
def test_a_damaged_input_is_built_again_by_the_command_that_is_printed(
    typed, tmp_path, flag, damage
):
    """The step that reads it, directly or through another output, names the step that wrote it."""
    file, store = tmp_path / f"{tmp_path.name}.py", tmp_path / "my store"
    file.write_text(GRAPH)
    words = ("run", file, "--executor", "inline", "--prefix", store)
    assert typed(*words)[0] == 0
    damage(next(store.glob("numbers-*")))
    status, _, err = typed(*words, flag, 3)
    assert status == 1
    assert typed(*words, flag, 3)[0] == 1
    (command,) = re.findall(r"^  retry: (.*)$", err, re.MULTILINE)
    program, *again = shlex.split(command)
    assert program == "ponente"
    assert again[-2:] == ["--force", "it's [a, b]"], "this step, and no other"
    assert typed(*again)[0] == 0
    assert typed(*words, flag, 3)[0] == 0
