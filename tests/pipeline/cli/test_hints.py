"""What a mistyped command line is told, and what `plan` shows of many differences."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

import pytest

from pipeline import Experiment, Result, StepContext, step
from tests.pipeline.toy import Total


@dataclass(frozen=True)
class Rates:
    """Rates of something."""

    learning_rate: float = 0.1
    zero_outputs: bool = False
    rules: tuple[tuple[str, tuple[str, ...]], ...] = (("batch", ("data",)), ("mlp", ("a", "b")))


@dataclass(frozen=True)
class Knobs:
    """Four settings and a configuration."""

    one: int = 0
    two: int = 0
    three: int = 0
    four: int = 0
    rates: Rates = Rates()


@step(output=Total, version=1)
def adjust(run: StepContext, *, knobs: Knobs) -> Result:
    return {"total": 0}


def adjusted(knobs: Knobs = Knobs(), least: float = 0.5) -> Total:
    return adjust(knobs=knobs)


experiment = Experiment(adjusted, quick={"least": 0.1})
FILE = """
from tests.pipeline.cli.test_hints import adjusted
from pipeline import Experiment
experiment = Experiment(adjusted, quick={"least": 0.1})
"""


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--quik", "did you mean --quick?"),
        ("--knobs.rates.lr", "did you mean --knobs.rates.learning-rate?"),
        ("--lr", "did you mean --knobs.rates.learning-rate?"),
        ("--zero-outputs", "did you mean --knobs.rates.zero-outputs?"),
        ("--learning-rat", "did you mean --knobs.rates.learning-rate?"),
        ("--knobs.rates.dropout", "expected one of --knobs.rates.learning-rate, "),
        ("--exekutor", "did you mean --executor?"),
        ("--colour", "no flag '--colour'; see"),
    ],
)
def test_a_wrong_flag_is_told_the_nearest_one_if_that_is_near(ponente, flag, hint):
    """By the last part of its name, presets included; a distant one is no help."""
    status, _, err = ponente(flag, "1", experiment=experiment)
    assert status == 2
    assert hint in err


def test_words_may_follow_flags(ponente):
    """A step behind the settings, as in front of them; a verb without words refuses one."""
    in_front = ponente("plan", "adjust", "--least", "0.3", experiment=experiment)
    assert in_front == ponente("plan", "--least", "0.3", "adjust", experiment=experiment)
    assert in_front[0] == 0
    status, _, err = ponente("run", "--least", "0.3", "adjust", experiment=experiment)
    assert (status, "takes no 'adjust'" in err) == (2, True)


def test_the_settings_are_listed_without_the_items_of_tuples(ponente):
    """Each item of a tuple of tuples would be a flag, and several lines."""
    status, out, _ = ponente("--help-settings", experiment=experiment)
    assert status == 0
    assert "--knobs.rates.learning-rate" in out
    assert not re.search(r"rules\.\d", out)


def test_plan_counts_more_than_three_differences_and_names_the_command_that_lists_them(
    tmp_path, typed
):
    """Three are listed; the command works as it is printed, in any shell."""
    file = tmp_path / "my own.py"
    file.write_text(FILE)
    where = (file, "--prefix", tmp_path / "store")

    def plan(*words):
        status, out, err = typed("plan", *where, *words)
        assert status == 0, err
        return out

    assert typed("run", *where, "--executor", "inline")[0] == 0
    three = ["--knobs.one", "1", "--knobs.two", "2", "--knobs.three", "3"]
    line = next(x for x in plan(*three).splitlines() if "run " in x)
    assert "knobs.one: 0 -> 1; " in line
    assert line.count("->") == 3
    more = plan("--quick", *three, "--knobs.four", "4")
    found = re.search(r"4 settings differ from the nearest output \((.*)\)$", more, re.MULTILINE)
    assert found
    assert "->" not in more
    program, *words = shlex.split(found[1])
    assert (program, str(file) in words) == ("ponente", True)
    assert typed(*words)[1].count("->") == 4
