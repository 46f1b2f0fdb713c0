"""Programming problems: a prompt that a model completes, and tests that the program must pass.

A program is the prompt, the completion's first function body and the tests, in one file. It passes
if it compiles and exits with 0, as in HumanEval (Chen et al., 2021, arXiv:2107.03374).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipeline.errors import InputError, unknown
from training.evaluate.programs.sandbox import FOLDER, Limits, run

_FIELDS = {"name", "language", "prompt", "tests"}


class Language(NamedTuple):
    """How to compile and run a file: words, "tool" for the tool's path; None for this Python."""

    file: str
    tool: str | None
    compile: str
    run: str


LANGUAGES = {
    "python": Language("main.py", None, "tool -I -S -m py_compile main.py", "tool -I -S main.py"),
    "c": Language("main.c", "gcc", "tool main.c -o main -lm", f"{FOLDER}/main"),
    "cpp": Language("main.cpp", "g++", "tool -std=c++17 main.cpp -o main", f"{FOLDER}/main"),
}


@dataclass(frozen=True)
class Problem:
    """One problem: the program up to the first line of a function's body, and its end.

    The end exits with a nonzero status when a test fails. `completion` is a given answer; None when
    a model generates it.
    """

    name: str
    language: str
    prompt: str
    tests: str
    completion: str | None = None


@dataclass(frozen=True)
class Judged:
    """The result of one answer; `ended` and `output` are those of its last command."""

    problem: str
    language: str
    program: str
    compiled: bool
    passed: bool
    ended: str
    output: str


def parse_problems(lines: bytes, source: str) -> list[Problem]:
    """Problems from JSON lines; `InputError` names the line that is none."""
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
    """The part of a completion that belongs to the function that the prompt begins.

    The completion's first line continues the prompt's last one. The body ends before the next line
    that is neither empty nor indented; if that line begins with "}", the brace is kept.
    """
    first, *rest = completion.split("\n")
    kept = [first]
    for line in rest:
        if line and not line[0].isspace():
            return "\n".join([*kept, "}"] if line[0] == "}" else kept)
        kept.append(line)
    return "\n".join(kept)


def tool(language: str) -> str:
    """Absolute path of the compiler or interpreter of a language."""
    name = LANGUAGES[language].tool
    if name is None:
        return os.path.realpath(sys.executable)
    found = shutil.which(name, path="/usr/local/bin:/usr/bin:/bin")
    if found is None:
        raise InputError(
            f"language {language!r}: expected {name} in /usr/local/bin, /usr/bin or /bin, found "
            "none; install it, or leave the problems of this language out"
        )
    return found


def judge(problem: Problem, completion: str, limits: Limits) -> Judged:
    language, command = LANGUAGES[problem.language], tool(problem.language)
    program = f"{problem.prompt}{function_body(completion)}\n{problem.tests}\n"
    commands = [
        [command if word == "tool" else word for word in words.split()]
        for words in (language.compile, language.run)
    ]
    outcome = run({language.file: program}, commands, limits)
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
    """Pass rates for "all" and each language, with the numbers of problems and of answers to each.

    `compiled` and `pass@1` are shares of the answers; `pass@n`, with n answers per problem, is the
    share of problems that at least one of them solves.
    """
    found = {}
    for language in ("all", *sorted({one.language for one in judged})):
        group = [one for one in judged if language in ("all", one.language)]
        problems = {one.problem for one in group}
        attempts = len(group) // len(problems)
        found[language] = {
            "items": len(problems),
            "attempts": attempts,
            "compiled": sum(one.compiled for one in group) / len(group),
            "pass@1": sum(one.passed for one in group) / len(group),
            f"pass@{attempts}": len({one.problem for one in group if one.passed}) / len(problems),
        }
    return found
