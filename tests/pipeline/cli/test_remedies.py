"""What errors say to do: run exactly as printed, by a shell, it works."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from pipeline.store.manifest import load

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


FAILS = """
from pathlib import Path
from pipeline import Experiment, InputError, Result, StepContext, step
from tests.pipeline.toy import Numbers, Total, noise, numbers

@step(output=Total, version=1)
def last(run: StepContext, made: Numbers) -> Result:
    if not Path({flag!r}).exists():
        raise InputError("no flag")
    return {{}}

experiment = Experiment(lambda: last(noise(numbers(count=4))))
"""


def test_a_forced_step_is_not_built_again_when_a_later_one_fails(typed, tmp_path):
    """By the retry that is printed, or by the same command; after a run that ended well it is."""
    file, store, flag = tmp_path / "graph_of_mine.py", tmp_path / "store", tmp_path / "flag"
    file.write_text(FAILS.format(flag=str(flag)))
    words = ("run", file, "--prefix", store, "--executor", "inline")
    assert typed(*words, "--until", "noise")[0] == 0

    def content():
        return load(str(next(store.glob("noise-*")))).content

    before = content()
    words = (*words, "--force", "noise,numbers")
    err = typed(*words)[2]
    assert (first := content()) != before
    (retry,) = re.findall(r"^  retry: (.*)$", err, re.MULTILINE)
    assert "--force" not in retry
    for _ in range(2):
        status, out, _ = typed(*words)
        assert (status, content()) == (1, first)
        assert "--force noise: run 20" in out
    flag.touch()
    assert (typed(*words)[0], content()) == (0, first)
    assert (typed(*words)[0], content() == first) == (0, False)
