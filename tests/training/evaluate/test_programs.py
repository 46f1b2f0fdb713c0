"""Problems are read, answers cut, programs judged and counted."""

import json
import shutil

import pytest

from pipeline.errors import InputError
from training.evaluate.programs.problems import (
    Judged,
    Problem,
    function_body,
    judge,
    parse_problems,
    rates,
)
from training.evaluate.programs.sandbox import Limits, check

LIMITS = Limits(seconds=20)
DOUBLE = Problem("double", "python", "def double(x):\n    return", "assert double(3) == 6")
SQUARE = Problem(
    "square",
    "cpp",
    "#include <cassert>\nint square(int x) {\n",
    "int main() { assert(square(3) == 9); }",
)


@pytest.fixture(scope="module")
def possible():
    try:
        check(LIMITS)
    except InputError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("completion", "body"),
    [
        (" 1\n\n  return 2\nprint(3)\n", " 1\n\n  return 2"),
        ("  return 1;\n}\nint main() {}", "  return 1;\n}"),
        ("  return 1;\n};  // end\n", "  return 1;\n}"),
        ("return 1", "return 1"),
        ("", ""),
    ],
)
def test_an_answer_ends_with_its_function(completion, body):
    """A model writes on, and what follows is no part of the answer."""
    assert function_body(completion) == body


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "completion", "compiled", "passed", "ended"),
    [
        (DOUBLE, " 2 * x\ndef x(:", True, True, "exit 0"),
        (DOUBLE, " x", True, False, "exit 1"),
        (DOUBLE, " (", False, False, "exit 1"),
        (SQUARE, "  return x * x;\n}\nnonsense", True, True, "exit 0"),
        (SQUARE, "  return x;\n}", True, False, "SIGABRT"),
    ],
)
def test_an_answer_passes_if_its_program_does(
    problem, completion, compiled, passed, ended, possible
):
    if problem.language == "cpp" and not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    found = judge(problem, completion, LIMITS)
    assert (found.compiled, found.passed, found.ended) == (compiled, passed, ended), found.output


def test_rates_are_shares_of_answers_and_of_problems():
    """Two problems of two answers each, counted by hand."""
    table = [("a", "c", True, True), ("a", "c", True, False), ("b", "cpp", True, False)]
    rows = [*table, ("b", "cpp", False, False)]
    found = rates([Judged(name, kind, "", c, p, "", "") for name, kind, c, p in rows])
    both = {"items": 2, "attempts": 2, "compiled": 0.75, "pass@1": 0.25, "pass@2": 0.5}
    assert found["all"] == both
    assert found["c"] == {**both, "items": 1, "compiled": 1.0, "pass@1": 0.5, "pass@2": 1.0}
    assert found["cpp"] == {**both, "items": 1, "compiled": 0.5, "pass@1": 0.0, "pass@2": 0.0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: expected JSON"),
        ('{"name": "x"}', "line 2: expected an object of texts"),
        (json.dumps({**vars(DOUBLE), "completion": "x", "language": "pithon"}), "mean python"),
        (json.dumps({**vars(DOUBLE), "completion": "x"}), "different names"),
    ],
)
def test_a_line_that_is_no_problem_is_named(line, message):
    first = json.dumps({**vars(DOUBLE), "completion": " 2 * x"})
    with pytest.raises(InputError, match=message):
        parse_problems(f"{first}\n{line}\n".encode(), "problems.jsonl")
    assert parse_problems(f"{first}\n\n".encode(), "x")[0].completion == " 2 * x"
