"""Train a model on shuffled sequences: the step, and its calls of `training.trainer.trainer`.

Every process of the hardware runs the training loop. A checkpoint exists when the ledger has a
record of it; a new attempt, on the same or other hardware, resumes from the newest intact one.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping
from typing import Annotated, Any

from models.shape.config import TransformerConfig
from pipeline import GangProcess, Hardware, InputError, Result, Runtime, StepContext, local, step
from pipeline.errors import CorruptOutput, Preempted, StorageError
from pipeline.events import Emit, Phase, Progress, Warned
from pipeline.identity.fingerprint import plain_identity
from pipeline.store import integrity, storage
from pipeline.store.ledger import Ledger
from pipeline.store.shards import File, Shard, wrong_sizes
from steps.artifacts import TRAIN, Checkpoint, Sequences
from steps.checkpoints.find import describe
from steps.declared import check_training
from steps.gang import FLAGS, TRACKING, coordinator_of
from steps.training.budget import check_budget, resolved, told_epochs
from steps.training.plan.facts import training_facts
from steps.training.training_result import measured, summary
from training.checkpoint.retention import kept_for_good
from training.config import OptimizerConfig, TrainConfig
from training.config.batch_schedule import rows_read

_LOG_SECONDS = 10.0  # between two lines of a training in its log

logger = logging.getLogger(__name__)

# Prefix of the ledger's compiled train steps, which restarts load. It sorts before "checkpoint",
# because `plan` shows the progress of the last record by name.
PROGRAMS = "binary/"


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The argument of every process of the gang: the job, and the ledger of its checkpoints."""

    job: Any
    ledger: Ledger


def _check(arguments: Mapping[str, Any]) -> None:
    check_budget(arguments)
    check_training(arguments, arguments["model"])


def advise(config: Mapping[str, Any]) -> list[str]:
    """Lines of `plan` about a step that trains."""
    return [warning] if (warning := config["train"].short_for_ema) else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """The arguments that all steps that train have in common.

    Attributes:
        sequences: training data.
        model, optimizer, train: the configurations.
        splits: held-out splits to evaluate on; empty for all but "test".
        prompts: texts that the model continues at every evaluation.
        hardware: the hardware to train on.
        start: a `training.config.job.Start`, or None to initialize new parameters.
        first_steps: see `Checkpoint.first_steps`; 0 for a run that begins at step 0.
    """

    sequences: Sequences
    model: TransformerConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    splits: tuple[str, ...]
    prompts: tuple[str, ...]
    hardware: Hardware
    start: Any = None
    first_steps: int = 0


@step(
    output=Checkpoint,
    version=6,
    cpus=0,
    check=_check,
    advise=advise,
    facts=training_facts,
    environment=(*FLAGS, *TRACKING),
)
def train(
    run: StepContext,
    sequences: Sequences,
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    *,
    epochs: float | None = None,
    tokens: int | None = None,
    splits: tuple[str, ...] = (),
    sample_prompts: tuple[str, ...] = (),
    hardware: Annotated[Hardware, Runtime] = local(),
) -> Result:
    """A trained model; sizes that do not fit are refused before compilation.

    Args:
        run: the attempt.
        sequences: training data; `train` takes their length and seed where it sets none.
        model: shape of the model.
        optimizer: the optimizer and its learning-rate schedule.
        train: batch size, intervals and, where `steps` is set, the budget.
        epochs: the budget otherwise, in passes over the sequences, rounded down to whole batches.
        tokens: the budget otherwise, in training tokens, rounded down to whole batches.
        splits: held-out splits to evaluate on during training; by default all but "test", which is
            reserved for the trained model. The result reports the loss on the first of them, which
            is validation if it exists.
        sample_prompts: texts that the model continues after each evaluation.
        hardware: the hardware to train on.
    """
    request = TrainRequest(
        sequences=sequences,
        model=model,
        optimizer=optimizer,
        train=resolved(train, sequences, epochs, tokens),
        splits=splits,
        prompts=sample_prompts,
        hardware=hardware,
    )
    return run_training(run, request)


def run_training(run: StepContext, request: TrainRequest) -> dict[str, Any]:
    """Train and return the step's result; the common body of all steps that train."""
    from data.batches.dataset import epochs
    from training.config.job import TrainJob
    from training.metrics.history import content_of, plain, read_history, write_history
    from training.metrics.journal import read_journals

    sequences, model, train = request.sequences, request.model, request.train
    cache = sequences.cache
    splits = cache.named_splits(request.splits or cache.validation_splits)
    if not splits:
        raise InputError(
            f"{cache.path}: no validation tokens, which the loss curve needs; "
            'sample with splits=(("validation", tokens),)'
        )
    job = TrainJob(
        model=model,
        optimizer=request.optimizer,
        train=train,
        data=sequences.dataset(),
        splits=splits,
        prompts=_prompts(sequences, request.prompts),
        token_bytes=tuple(cache.token_bytes().tolist()),
        padded=sequences.padded,
        checkpoint_directory=storage.join(run.directory, "checkpoints"),
        attempt=run.attempt,
        resume_from=_checkpoints(run),
        start=request.start,
        name=run.root.rpartition("/")[2],
        run_directory=run.keep,
        journal_directory=storage.join(run.root, "journal", run.ledger.build),
        programs=earlier_programs(run),
        program_directory=storage.join(run.directory, "programs"),
    )
    describe(run, sequences, model, train)
    passes = epochs(job.data, rows_read(train, train.steps))
    for warning in filter(None, (train.short_for_ema, told_epochs(passes))):
        run.warn(warning)
    trained = run.gang(request.hardware, train_process, Assignment(job, run.ledger))
    _declare_checkpoints(run, trained["checkpoints"])
    history = trained["history"]
    for name in _claim_programs(run):  # a finished run has no restart that could load them
        run.drop(name)
    with run.shard("record", {"content": content_of(history)}) as directory:
        write_history(directory, history)
        journals = [each.to_json() + b"\n" for each in read_journals(job.journal_directory)]
        storage.write_atomic(storage.join(directory, "journals.jsonl"), b"".join(journals))
    entropy = cache.result["splits"][TRAIN]["unigram_entropy"]
    identity = plain_identity(train)
    evaluations = [plain(entry) for entry in read_history(history, ["evaluation"])]
    if skipped := trained["skipped"]:
        run.warn(
            f"{skipped:,} of {train.steps:,} updates were not applied (column `skipped` of "
            "metrics.jsonl): not finite, a loss spike, or no counted token"
        )
    return {
        **summary(trained["checkpoint"], evaluations, entropy, skipped),
        "model": plain_identity(model),
        "train": identity,
        "first_steps": request.first_steps or train.steps,
        "epochs": list(passes),
        "measured": {
            **measured(trained, request.hardware),
            "runtime": {k: v for k, v in dataclasses.asdict(train).items() if k not in identity},
        },
    }


def _declare_checkpoints(run: StepContext, names: list[str]) -> None:
    """Publish the checkpoints that training kept, without corrupt ones before the last.

    Later steps read the last checkpoint; a corrupt earlier one must not block its publication.
    """
    for name in names:
        run.declare(name)
    before_last = [run.declared[name] for name in names[:-1]]
    for shard, problem in wrong_sizes(run.root, before_last):
        run.warn(f"corrupt checkpoint: {problem}; it is not published")
        run.drop(shard.name)


def _prompts(sequences: Sequences, prompts: tuple[str, ...]) -> Any:
    if not prompts:
        return None
    from training.config.job import Prompts

    return Prompts(tokenizer=sequences.cache.tokenizer().file, prompts=prompts)


def train_process(assignment: Assignment, *, process: GangProcess, emit: Emit) -> dict[str, Any]:
    """One process of the gang: run the training loop and record its checkpoints in the ledger."""
    entered, began = time.time(), time.perf_counter()
    emit(Phase("importing"))
    from training.trainer.run_context import RunContext
    from training.trainer.trainer import train as train_loop

    # The engine may run on another machine, whose clock may be ahead: clamp to 0.
    starting = max(0.0, entered - process.started)
    before = {"starting": starting, "importing": time.perf_counter() - began}

    emit(Phase("restoring and compiling"))
    job, ledger, logged = assignment.job, assignment.ledger, [-_LOG_SECONDS]

    def on_commit(step: int, path: str) -> None:
        record_checkpoint(ledger, job.train, step, path, job.train.steps)

    def on_drop(step: int, path: str) -> None:
        drop_checkpoint(ledger, step, path, job.attempt)

    def on_program(kept: Any) -> None:
        record_program(ledger, kept)

    def on_progress(step: int, steps: int, row: dict[str, Any]) -> None:
        # The average, as one step's rate says little beside the run's own steps per second.
        note = f"loss {row['loss']:.3f}  {row['tokens_per_second_average']:,.0f} tokens/s"
        emit(Progress(step, steps, "steps", note))
        if (now := time.monotonic()) - logged[-1] >= _LOG_SECONDS or step == steps:
            logged[-1] = now
            logger.info("step %d of %d: %s", step, steps, note)

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        if kind == "corrupt_checkpoint":
            emit(Warned(f"corrupt checkpoint: {fields['reason']}"))
        elif kind == "failed_checkpoint":
            text = f"checkpoint of step {fields['step']} failed, the next will be saved"
            emit(Warned(f"{text}: {fields['reason']}"))
        elif kind == "resumed":
            emit(Phase(f"resumed from step {fields['step']}"))
        elif kind == "evaluation":
            if not math.isfinite(fields["loss"]):
                text = f"step {fields['step']}: the loss on {fields['split']} is {fields['loss']}"
                emit(Warned(text))
        elif kind in ("learning_rate", "tracker"):
            emit(Warned(fields["reason"]))
        elif kind == "watchdog":
            first_line = fields["report"].partition("\n")[0]
            message = f"{first_line}; see {_keep_stacks(job, fields)}"
            emit(Warned(message))

    context = RunContext(
        coordinator=coordinator_of(process),
        on_commit=on_commit,
        on_drop=on_drop,
        on_progress=on_progress,
        on_event=on_event,
        on_program=on_program,
        before=before,
    )
    result = train_loop(job, context)
    if result.preempted:
        raise Preempted(f"preempted after step {result.steps}; the next attempt resumes from there")
    return {
        **dataclasses.asdict(result),
        "checkpoint": shard_name(result.steps),
        "checkpoints": [shard_name(step) for step, _ in result.checkpoints],
    }


def record_checkpoint(
    ledger: Ledger, train: TrainConfig, step: int, path: str, steps: int | None = None
) -> None:
    """Record a complete checkpoint, from which the next attempt can resume.

    The record's name depends on the step alone, so a newer attempt replaces the record that an
    older attempt has of the same step: the older attempt may still run and delete its own files.
    `steps` is the length of the run, for the progress text.
    """
    from training.checkpoint.index import content_of, measured, read_index

    index = read_index(path)
    name, files = shard_name(step), [File(*file, "") for file in measured(index)]
    # Which checkpoints exist only for resuming depends on when attempts ended, so the content
    # digest of the output leaves them out.
    kept = kept_for_good(step, train)
    progress = f"step {step:,} of {steps:,}" if steps else f"step {step:,}"
    result = {
        "step": step,
        "content": content_of(index) if kept else None,
        "progress": f"{progress} saved",
    }
    ledger.add(name, path, result, files, replace=True)


def record_program(ledger: Ledger, kept: Any) -> None:
    """Record a `KeptProgram`, in place of an older attempt's record of the same program."""
    directory, _, name = kept.path.rpartition("/")
    file = integrity.measure(directory, name)
    if (file.size, file.sha256) != (kept.size, kept.sha256):
        raise StorageError(f"{kept.path}: the written file does not read back as it was written")
    result = {"made_for": dict(kept.made_for), "progress": "step compiled"}
    name = f"{PROGRAMS}{kept.made_for['program'][:16]}"
    ledger.add(name, directory, result, [file], replace=True)


def _claim_programs(run: StepContext) -> dict[str, Shard]:
    try:
        return run.claim(PROGRAMS)
    except CorruptOutput as error:  # training can still resume from the checkpoints
        run.warn(f"kept programs ignored: {error}")
        return {}


def earlier_programs(run: StepContext) -> tuple[Any, ...]:
    """Compiled train steps of earlier attempts; this attempt becomes their owner."""
    from training.config.job import KeptProgram

    return tuple(
        KeptProgram(
            path=storage.join(run.root, shard.root, file.path),
            size=file.size,
            sha256=file.sha256,
            made_for=shard.result["made_for"],
        )
        for shard in _claim_programs(run).values()
        for file in shard.files
    )


def drop_checkpoint(ledger: Ledger, step: int, path: str, attempt: str) -> None:
    """Remove the record of the checkpoint at `path`; a record of another path stays.

    Raises:
        WorkerLost: an attempt newer than `attempt` owns the record; its files must stay.
    """
    recorded = ledger.find(shard_name(step))
    if recorded is not None and storage.join(ledger.root, recorded.root) == path.rstrip("/"):
        ledger.drop(recorded.name, attempt)


def _keep_stacks(job: Any, fields: dict[str, Any]) -> str:
    """Write a process's stacks to the run's directory; returns the URL."""
    url = storage.join(job.run_directory, "stacks", f"process-{fields['process']}.txt")
    storage.write_atomic(url, fields["report"].encode())
    return url


def shard_name(step: int) -> str:
    """Name of a step's checkpoint in ledger and manifest, the same for all attempts."""
    return f"checkpoint/{step:08d}"


def _checkpoints(run: StepContext) -> tuple[tuple[int, str], ...]:
    """(step, URL) of earlier attempts' checkpoints by step; this attempt becomes their owner."""
    shards = run.claim("checkpoint/").values()
    return tuple(sorted((s.result["step"], storage.join(run.root, s.root)) for s in shards))
