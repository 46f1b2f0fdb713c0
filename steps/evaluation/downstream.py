"""Downstream tasks: multiple-choice questions, lm-evaluation-harness, and programming problems."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from data.read.listing import absolute, list_folder, list_source
from models.generate.sampling_config import Sampling
from models.shape.validation import at_least
from pipeline import (
    External,
    GangProcess,
    Hardware,
    InputError,
    Result,
    Runtime,
    StepContext,
    local,
    step,
)
from pipeline.events import Emit
from pipeline.store import storage
from steps.artifacts import Checkpoint, Scores, Tokenizer
from steps.checkpoints.find import read_tokenizer
from steps.evaluation.generate import GenerationJob, write_process
from steps.gang import FLAGS, HUB, joined
from training.evaluate.programs.sandbox import Limits

if TYPE_CHECKING:
    from data.tokenizer.text_tokenizer import TextTokenizer
    from training.evaluate.loglikelihood import Question


class _Work(NamedTuple):
    model: Checkpoint
    tokenizer: Tokenizer
    settings: Mapping[str, Any]
    batch_size: int | None


@step(output=Scores, version=2, cpus=0, environment=(*FLAGS, *HUB))
def multiple_choice(
    run: StepContext,
    model: Checkpoint,
    tokenizer: Tokenizer,
    *,
    questions: Annotated[str, External(list_source, absolute)],
    delimiter: str = " ",
    batch_size: Annotated[int | None, Runtime] = None,
    hardware: Annotated[Hardware, Runtime] = local(),
) -> Result:
    """Accuracies on the questions of a file, as lm-evaluation-harness defines them.

    Args:
        model: a trained model.
        tokenizer: the tokenizer of its training.
        questions: URL of JSON lines: {"context": text, "choices": [text, ...], "gold": index}.
        delimiter: text between context and choice.
        batch_size: sequences per batch; None for that of evaluations during training.
    """
    settings = {"questions": questions, "delimiter": delimiter}
    work = _Work(model, tokenizer, settings, batch_size)
    row = run.gang(hardware, answer_process, work)
    return {**row, "headline": [f"accuracy {row['acc']:.3f} of {row['items']} questions"]}


def _check_harness(arguments: Mapping[str, Any]) -> None:
    hardware = arguments["hardware"]
    if hardware.processes != 1:
        raise InputError(f"hardware {hardware.name!r}: lm_eval runs in one process; give it local")
    if not arguments["tasks"]:
        raise InputError('lm_evaluation: expected names of tasks, found none; such as ("piqa",)')


@step(output=Scores, version=2, cpus=0, check=_check_harness, environment=(*FLAGS, *HUB))
def lm_evaluation(
    run: StepContext,
    model: Checkpoint,
    tokenizer: Tokenizer,
    *,
    tasks: tuple[str, ...],
    include_path: Annotated[str | None, External(list_folder, absolute)] = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: Annotated[int | None, Runtime] = None,
    hardware: Annotated[Hardware, Runtime] = local(),
) -> Result:
    """Metrics of tasks of EleutherAI's lm-evaluation-harness, which `ponente[lm-eval]` installs.

    Args:
        model: a trained model.
        tokenizer: the tokenizer of its training.
        tasks: names of tasks of the harness or of `include_path`.
        include_path: a folder with your own tasks as YAML. The contents of all its files are part
            of the key, so local data of the tasks should be in it.
        num_fewshot: examples before each question; None for the task's own number.
        limit: most questions of each task; None for all.
        batch_size: sequences per batch; None for that of evaluations during training.
        hardware: the hardware to run on, with one process.
    """
    settings = {"include_path": include_path, "num_fewshot": num_fewshot, "limit": limit}
    work = _Work(model, tokenizer, {"tasks": tasks, **settings}, batch_size)
    answered = run.gang(hardware, harness_process, work)
    return {
        "tasks": answered["tasks"],
        "measured": {"lm_eval": answered["version"]},
        "headline": [
            f"{task}: " + ", ".join(f"{name} {metrics[name]:.3f}" for name in sorted(metrics))
            for task, metrics in answered["tasks"].items()
        ],
    }


def answer_process(work: _Work, *, process: GangProcess, emit: Emit) -> dict[str, Any]:
    from models.jax_numerics import fixed_numerics
    from training.evaluate.loglikelihood import accuracy, answer

    del emit
    with joined(process), fixed_numerics():
        tokenizer = read_tokenizer(work.tokenizer.file, work.model.model)
        questions = read_questions(
            work.settings["questions"], tokenizer, work.settings["delimiter"]
        )
        likelihood, model = _loaded(work, tokenizer)
        return accuracy(questions, answer(likelihood, model, questions))


def harness_process(work: _Work, *, process: GangProcess, emit: Emit) -> dict[str, Any]:
    import importlib.metadata

    from models.jax_numerics import fixed_numerics
    from training.evaluate.lm_eval_adapter import adapter, harness, run_tasks

    del process, emit
    settings = dict(work.settings)
    tasks, folder = settings.pop("tasks"), settings.pop("include_path")
    harness()  # refuses a missing installation before the model is loaded
    tokenizer = read_tokenizer(work.tokenizer.file, work.model.model)
    with fixed_numerics():
        likelihood, model = _loaded(work, tokenizer)
        lm = adapter(model, likelihood, tokenizer, work.model.train.sequence_length)
        if folder is not None:
            from lm_eval.tasks import TaskManager  # pyrefly: ignore[missing-import]

            settings["task_manager"] = TaskManager(include_path=folder)
        version = importlib.metadata.version("lm_eval")
        return {"tasks": run_tasks(lm, tasks, **settings), "version": version}


def _loaded(work: _Work, tokenizer: TextTokenizer) -> tuple[Any, Any]:
    from training.evaluate.checkpoint_scorer import load_scored

    found, size = work.model, work.batch_size
    return load_scored(found.final, found.model, found.train, tokenizer.eos_id, batch_size=size)


def read_questions(url: str, tokenizer: TextTokenizer, delimiter: str) -> Sequence[Question]:
    from training.evaluate.loglikelihood import text_question

    found = []
    # Not `str.splitlines`: JSON strings may contain other characters that it takes for line ends.
    for number, line in enumerate(storage.read_bytes(url).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            asked = json.loads(line)
            context, choices, gold = (asked[name] for name in ("context", "choices", "gold"))
            found.append(text_question(tokenizer, context, choices, gold, delimiter=delimiter))
        except (ValueError, KeyError, TypeError, AttributeError, InputError) as error:
            raise InputError(
                f'{url}, line {number}: expected {{"context": text, "choices": [text, ...], '
                f'"gold": index}}, found {line[:80].decode(errors="replace")!r} ({error})'
            ) from error
    if not found:
        raise InputError(f"{url}: no questions; give a line for each")
    return found


def _check_programs(arguments: Mapping[str, Any]) -> None:
    at_least(
        "code_evaluation",
        attempts=(arguments["attempts"], 1),
        new_tokens=(arguments["new_tokens"], 1),
    )


@step(output=Scores, version=2, check=_check_programs, environment=FLAGS)
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
        answers = [(each, each.completion) for each in found if each.completion is not None]
        if missing := [each.name for each in found if each.completion is None]:
            raise InputError(
                f"{problems}: problem {missing[0]!r} has no completion; give one, or a model"
            )
    else:
        repeated = [problem for problem in found for _ in range(attempts)]
        request = GenerationJob(
            checkpoint=model,
            tokenizer=tokenizer or model.tokenizer(),
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
