"""Programming problems: compile and run a model's or given answers in a sandbox; report rates."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from data.read.listing import absolute, list_source
from models.generate.sampling_config import Sampling
from models.shape.validation import at_least
from pipeline import External, Hardware, InputError, Result, Runtime, StepContext, local, step
from pipeline.store import storage
from steps.artifacts import Checkpoint, Scores, Tokenizer
from steps.evaluation.generate import Request, write_process
from steps.gang import FLAGS
from training.evaluate.programs.sandbox import Limits

if TYPE_CHECKING:
    from training.evaluate.programs.problems import Problem


def _check(arguments: Mapping[str, Any]) -> None:
    at_least(
        "code_evaluation",
        attempts=(arguments["attempts"], 1),
        new_tokens=(arguments["new_tokens"], 1),
    )


@step(output=Scores, version=2, check=_check, environment=FLAGS)
def code_evaluation(
    run: StepContext,
    model: Checkpoint | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    problems: Annotated[str, External(list_source, absolute)],
    attempts: int = 1,
    new_tokens: int = 256,
    sampling: Sampling = Sampling(temperature=0.2, top_k=None, top_p=0.95),
    limits: Limits = Limits(),
    hardware: Annotated[Hardware, Runtime] = local(),
) -> Result:
    """The share of programming problems that a model solves; answers run in a sandbox only.

    Args:
        model: generates the answers; None if every problem has a `completion`.
        tokenizer: by default the tokenizer of the model's training.
        problems: URL of JSON lines, see `training.evaluate.programs.problems.Problem`.
        attempts: answers that the model generates for each problem.
        new_tokens: most tokens of an answer.
        sampling: how answers are sampled. The default is HumanEval's for one answer per problem;
            several answers need a temperature of about 0.8.
        limits: limits of each command of a program.
        hardware: the hardware for generation. Programs run on the machine of this step.

    Raises:
        InputError: this machine cannot run programs safely (checked before generation), it has no
            compiler for a language, or the problems cannot be read.
    """
    from training.evaluate.programs.problems import judge, parse_problems, rates, tool
    from training.evaluate.programs.sandbox import check

    found = parse_problems(storage.read_bytes(problems), problems)
    version = check(limits)
    for language in {problem.language for problem in found}:
        tool(language)
    if model is None:
        answers = [(problem, _given(problem, problems)) for problem in found]
    else:
        repeated = [problem for problem in found for _ in range(attempts)]
        request = Request(
            checkpoint=model.final,
            model=model.model,
            dtype=model.train.compute_dtype,
            sequence_length=model.train.sequence_length,
            tokenizer=(tokenizer or model.tokenizer()).file,
            prompts=tuple(problem.prompt for problem in repeated),
            new_tokens=new_tokens,
            sampling=sampling,
        )
        answers = list(zip(repeated, run.gang(hardware, write_process, request), strict=True))
    judged = []
    for index, (problem, completion) in enumerate(answers):
        judged.append(judge(problem, completion, limits))
        run.progress(index + 1, len(answers), "programs")
    with run.shard("programs") as directory:
        lines = "".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in judged)
        storage.write_atomic(storage.join(directory, "programs.jsonl"), lines.encode())
    tasks = rates(judged)
    total = tasks["all"]
    return {
        "tasks": tasks,
        "measured": {"sandbox": version},
        "headline": [
            f"{total['pass@1']:.1%} of {len(judged)} programs pass their tests, "
            f"{total['compiled']:.1%} compile"
        ],
    }


def _given(problem: Problem, source: str) -> str:
    if problem.completion is None:
        raise InputError(
            f"{source}: problem {problem.name!r} has no completion; give one, or a model"
        )
    return problem.completion
