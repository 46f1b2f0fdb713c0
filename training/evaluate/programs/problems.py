"""Programming problems: a prompt, what a model writes after it, and tests that the whole must pass.

A program is the prompt, the completion's first function body and the tests, in one file. It passes
if it compiles and, run, exits with 0, as in HumanEval (Chen et al., 2021, arXiv:2107.03374).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import InputError, unknown
from training.evaluate.programs.sandbox import FOLDER, Limits, run

_FIELDS = {"name", "language", "prompt", "tests"}


@dataclass(frozen=True)
class Language:
    """How a language is compiled and run.

    Attributes:
        file: what the program is called.
        tool: looked for in the system's folders; empty for this Python.
        compile, run: arguments; the tool stands before the first, and before the second if
            `run_by_tool`.
    """

    file: str
    tool: str
    compile: tuple[str, ...]
    run: tuple[str, ...]
    run_by_tool: bool = False


LANGUAGES = {
    "python": Language(
        "main.py",
        "",
        ("-I", "-S", "-m", "py_compile", "main.py"),
        ("-I", "-S", "main.py"),
        run_by_tool=True,
    ),
    "c": Language("main.c", "gcc", ("main.c", "-o", "main", "-lm"), (f"{FOLDER}/main",)),
    "cpp": Language(
        "main.cpp", "g++", ("-std=c++17", "main.cpp", "-o", "main"), (f"{FOLDER}/main",)
    ),
}


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        name: of its own.
        language: one of `LANGUAGES`.
        prompt: how the program begins, up to the first line of the function's body.
        tests: how it ends; they exit with another status than 0 where a test fails.
        completion: a given answer; None where a model is to write one.
    """

    name: str
    language: str
    prompt: str
    tests: str
    completion: str | None = None


@dataclass(frozen=True)
class Judged:
    """What became of one answer.

    Attributes:
        problem, language: which.
        program: the whole text.
        compiled, passed: whether it did.
        ended: of its last command, see `sandbox.Outcome`.
        output: what it printed, the compiler's messages included.
    """

    problem: str
    language: str
    program: str
    compiled: bool
    passed: bool
    ended: str
    output: str


def parse_problems(lines: bytes, source: str) -> list[Problem]:
    """Problems from JSON lines.

    Raises:
        InputError: naming the line that is not a problem.
    """
    found: list[Problem] = []
    for number, line in enumerate(lines.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise InputError(f"{source}, line {number}: expected JSON: {error}") from error
        known = isinstance(fields, dict) and _FIELDS <= fields.keys() <= _FIELDS | {"completion"}
        if not known or not all(isinstance(value, str) for value in fields.values()):
            raise InputError(
                f"{source}, line {number}: expected an object of texts name, language, prompt, "
                f"tests and, where it is given, completion; found {line[:80]!r}"
            )
        if fields["language"] not in LANGUAGES:
            problem = unknown("language", fields["language"], LANGUAGES)
            raise InputError(f"{source}, line {number}: {problem}")
        found.append(Problem(**fields))
    names = [problem.name for problem in found]
    if not found or len(set(names)) < len(names):
        raise InputError(f"{source}: expected problems of different names, found {names[:20]}")
    return found


def function_body(completion: str) -> str:
    """What a completion adds to the function that the prompt begins.

    It ends before the first line, after the line that the prompt began, that is neither empty nor
    indented; if that line begins with a brace, the brace is part of it.
    """
    first, *rest = completion.split("\n")
    kept = [first]
    for line in rest:
        if line and not line[0].isspace():
            return "\n".join([*kept, "}"] if line[0] == "}" else kept)
        kept.append(line)
    return "\n".join(kept)


def tool(language: str) -> str:
    """Absolute path of what compiles a language.

    Raises:
        InputError: it is not installed where programs in the sandbox see it.
    """
    name = LANGUAGES[language].tool
    if not name:
        return os.path.realpath(sys.executable)
    found = shutil.which(name, path="/usr/local/bin:/usr/bin:/bin")
    if found is None:
        raise InputError(
            f"language {language!r}: expected {name} in /usr/local/bin, /usr/bin or /bin, found "
            "none; install it, or leave the problems of this language out"
        )
    return found


def judge(problem: Problem, completion: str, limits: Limits) -> Judged:
    """Compile and run one answer in the sandbox.

    Raises:
        InputError: this machine has no compiler for it, or cannot run it safely.
    """
    language, command = LANGUAGES[problem.language], tool(problem.language)
    program = f"{problem.prompt}{function_body(completion)}\n{problem.tests}\n"
    running = [command, *language.run] if language.run_by_tool else language.run
    outcome = run({language.file: program}, [[command, *language.compile], running], limits)
    done = [ended == "exit 0" for ended in outcome.ended]
    return Judged(
        problem=problem.name,
        language=problem.language,
        program=program,
        compiled=done[:1] == [True],
        passed=done == [True, True],
        ended=outcome.ended[-1],
        output=outcome.output,
    )


def rates(judged: Sequence[Judged]) -> dict[str, dict[str, Any]]:
    """For "all" and each language: problems, answers to each, and how many did how well.

    `compiled` and `pass@1` are shares of the answers; `pass@n`, with n answers to a problem, is the
    share of the problems that one of them solves.
    """
    groups: Mapping[str, list[Judged]] = {"all": list(judged)}
    for language in sorted({one.language for one in judged}):
        groups = {**groups, language: [one for one in judged if one.language == language]}
    return {name: _rates(group) for name, group in groups.items()}


def _rates(judged: Sequence[Judged]) -> dict[str, Any]:
    problems = {one.problem for one in judged}
    solved = {one.problem for one in judged if one.passed}
    attempts = len(judged) // len(problems)
    return {
        "items": len(problems),
        "attempts": attempts,
        "compiled": sum(one.compiled for one in judged) / len(judged),
        "pass@1": sum(one.passed for one in judged) / len(judged),
        f"pass@{attempts}": len(solved) / len(problems),
    }
