"""Train a model on shuffled sequences: the declaration, and the glue to `training.trainer.trainer`.

The loop runs on every process of the hardware at once. A checkpoint exists when its ledger record
does; a new attempt, on this hardware or another, resumes from the newest sound one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Annotated, Any

from models.config import TransformerConfig
from pipeline import GangProcess, Hardware, InputError, Result, Runtime, StepContext, local, step
from pipeline.errors import CorruptOutput, Preempted, StorageError
from pipeline.graph.step_context import Emit
from pipeline.identity.fingerprint import plain_identity
from pipeline.store import integrity, storage
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import File, Shard, wrong_sizes
from steps.artifacts import TRAIN, Checkpoint, Sequences
from steps.budget import check_budget, resolved
from steps.checkpoints.find import describe, tokenizer_of
from steps.coordinator import FLAGS, coordinator_of
from steps.declared import check_training
from steps.planning.facts import training_facts
from training.checkpoint.retention import kept_for_good
from training.config import OptimizerConfig, TrainConfig

# Compiled steps in the ledger, to restart with. Before "checkpoint" in the order of names, of which
# `plan` shows what the last says.
PROGRAMS = "binary/"


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What every process of the gang is sent: the job, and where its checkpoints are recorded."""

    job: Any
    ledger: Ledger


def _check(arguments: Mapping[str, Any]) -> None:
    check_budget(arguments)
    check_training(arguments, arguments["model"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What every step that trains asks for.

    Attributes:
        sequences: to train on.
        model, optimizer, train: what to train and how.
        splits: held-out splits to evaluate on; empty for all but "test".
        prompts: what the model writes after at every evaluation.
        hardware: where.
        start: a `training.config.job.Start`, or None to begin with new parameters.
    """

    sequences: Sequences
    model: TransformerConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    splits: tuple[str, ...]
    prompts: tuple[str, ...]
    hardware: Hardware
    start: Any = None


@step(
    output=Checkpoint,
    version=4,
    cpus=0,
    check=_check,
    facts=training_facts,
    environment=FLAGS,
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
    """A trained model; sizes that do not fit are refused before it compiles.

    Args:
        run: the attempt.
        sequences: to train on; their length and seed are the run's where `train` has none.
        model: its shape.
        optimizer: with the schedule of the learning rate.
        train: batches, cadence and, where it has `steps`, the budget.
        epochs: the budget otherwise, in passes over the sequences, rounded down to whole batches.
        tokens: the budget otherwise, in training tokens, rounded down to whole batches.
        splits: held-out splits to evaluate on meanwhile; by default all but "test", which is for
            the trained model. The first, validation where there is one, gives the loss in the
            result.
        sample_prompts: texts the model continues after each evaluation.
        hardware: where.
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
    """The body of every step that trains."""
    from training.config.job import TrainJob
    from training.metrics.history import content_of, plain, read_history, write_history
    from training.metrics.journal import read_journals

    sequences, model, train = request.sequences, request.model, request.train
    cache = sequences.cache
    sets = cache.held_out(request.splits or cache.validation_splits)
    if not sets:
        raise InputError(
            f"{cache.path}: no validation tokens, which the loss curve needs; "
            'sample with splits=(("validation", tokens),)'
        )
    job = TrainJob(
        model=model,
        optimizer=request.optimizer,
        train=train,
        data=sequences.dataset(),
        held_out=sets,
        prompts=_prompts(sequences, request.prompts),
        token_bytes=tuple(cache.token_bytes().tolist()),
        padded=sequences.padded,
        checkpoint_directory=storage.join(run.directory, "checkpoints"),
        attempt=run.attempt,
        resume_from=_checkpoints(run),
        start=request.start,
        name=run.root.rpartition("/")[2],
        run_directory=run.keep,
        journal_directory=storage.join(run.root, "journal", run.ledger.generation),
        programs=earlier_programs(run),
        program_directory=storage.join(run.directory, "programs"),
    )
    describe(run, sequences, model, train)
    trained = run.gang(request.hardware, train_process, Assignment(job, run.ledger))
    _declare_checkpoints(run, trained["checkpoints"])
    history = trained["history"]
    for name in _claim_programs(run):  # nothing restarts what is finished
        run.drop(name)
    with run.shard("record", {"content": content_of(history)}) as directory:
        write_history(directory, history)
        journals = [each.to_json() + b"\n" for each in read_journals(job.journal_directory)]
        storage.write_atomic(storage.join(directory, "journals.jsonl"), b"".join(journals))
    entropy = cache.result["splits"][TRAIN]["unigram_entropy"]
    identity = plain_identity(train)
    evaluations = [plain(entry) for entry in read_history(history, ["evaluation"])]
    return {
        **_summary(trained["checkpoint"], evaluations, entropy),
        "model": plain_identity(model),
        "train": identity,
        "measured": {
            **_measured(trained, request.hardware),
            "runtime": {k: v for k, v in dataclasses.asdict(train).items() if k not in identity},
        },
    }


def _declare_checkpoints(run: StepContext, names: list[str]) -> None:
    """Publish the checkpoints that training kept, but for damaged ones before the last.

    Nothing reads those while training goes well, and they are no reason to withhold the others.
    """
    for name in names:
        run.declare(name)
    before_last = [run.declared[name] for name in names[:-1]]
    for shard, problem in wrong_sizes(run.root, before_last):
        run.warn(f"damaged checkpoint: {problem}; it is left out of what is published")
        run.drop(shard.name)


def _prompts(sequences: Sequences, prompts: tuple[str, ...]) -> Any:
    if not prompts:
        return None
    from training.config.prompts import Prompts

    return Prompts(tokenizer=tokenizer_of(sequences).file, prompts=prompts)


def train_process(assignment: Assignment, *, process: GangProcess, emit: Emit) -> dict[str, Any]:
    """One process of the gang: the training loop, with checkpoints recorded in the ledger."""
    entered, began = time.time(), time.perf_counter()
    emit({"event": "phase", "phase": "importing"})
    from training.trainer.run_context import RunContext
    from training.trainer.trainer import train as train_loop

    # By the clocks of two machines where the engine's is another; never less than nothing.
    starting = max(0.0, entered - process.started)
    before = {"starting": starting, "importing": time.perf_counter() - began}

    emit({"event": "phase", "phase": "restoring and compiling"})
    job, ledger = assignment.job, assignment.ledger

    def on_commit(step: int, path: str) -> None:
        record_checkpoint(ledger, job.train, step, path, job.train.steps)

    def on_drop(step: int, path: str) -> None:
        drop_checkpoint(ledger, step, path, job.attempt)

    def on_program(kept: Any) -> None:
        record_program(ledger, kept)

    def on_progress(step: int, steps: int, row: dict[str, Any]) -> None:
        emit(
            {"event": "progress", "done": step, "total": steps, "unit": "steps", "note": _note(row)}
        )

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        if kind == "damaged_checkpoint":
            emit({"event": "warning", "message": f"damaged checkpoint: {fields['reason']}"})
        elif kind == "failed_checkpoint":
            text = f"checkpoint of step {fields['step']} failed, the next will be saved"
            emit({"event": "warning", "message": f"{text}: {fields['reason']}"})
        elif kind == "tracker":
            emit({"event": "warning", "message": fields["reason"]})
        elif kind == "watchdog":
            where = _keep_stacks(job, fields)
            emit({"event": "warning", "message": f"{_first_line(fields['report'])}; see {where}"})

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
    """Record a complete checkpoint, one of so many `steps`, which the next attempt resumes from.

    It is named by its step alone. Where an older attempt has recorded one of that step, the newer
    attempt's takes its place: the older one may still run, and delete its own.
    """
    from training.checkpoint.index import content_of, measured, read_index

    index = read_index(path)
    name, files = shard_name(step), [File(*file) for file in measured(index)]
    # What is only there to resume from depends on when attempts ended, and is no part of the model.
    kept = kept_for_good(step, train)
    progress = f"step {step:,} of {steps:,}" if steps else f"step {step:,}"
    result = {
        "step": step,
        "content": content_of(index) if kept else None,
        "progress": f"{progress} saved",
    }
    ledger.replace(name, path, result, files)


def record_program(ledger: Ledger, kept: Any) -> None:
    """Record a `KeptProgram`; that of an older attempt at the same program gives way."""
    directory, _, name = kept.path.rpartition("/")
    file = integrity.measure(directory, name)
    if (file.size, file.sha256) != (kept.size, kept.sha256):
        raise StorageError(f"{kept.path}: what was written does not read back")
    result = {"made_for": dict(kept.made_for), "progress": "step compiled"}
    ledger.replace(f"{PROGRAMS}{kept.made_for['program'][:16]}", directory, result, [file])


def _claim_programs(run: StepContext) -> dict[str, Shard]:
    try:
        return run.claim(PROGRAMS)
    except CorruptOutput as error:  # no reason to withhold the checkpoints
        run.warn(f"kept programs ignored: {error}")
        return {}


def earlier_programs(run: StepContext) -> tuple[Any, ...]:
    """Compiled steps of earlier attempts; this attempt owns them now."""
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
    """Remove the record of the checkpoint at `path`; another one of that step stays.

    Raises:
        WorkerLost: when an attempt newer than `attempt` owns it: its files are to stay then.
    """
    recorded = ledger.find(shard_name(step))
    if recorded is not None and storage.join(ledger.root, recorded.root) == path.rstrip("/"):
        ledger.drop(recorded.name, attempt)


def _keep_stacks(job: Any, fields: dict[str, Any]) -> str:
    """Write a process's stacks where they are kept; returns where."""
    url = storage.join(job.run_directory, "stacks", f"process-{fields['process']}.txt")
    storage.write_atomic(url, fields["report"].encode())
    return url


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def shard_name(step: int) -> str:
    """Name of the checkpoint of a step in ledger and manifest, whichever attempt saved it."""
    return f"checkpoint/{step:08d}"


def _checkpoints(run: StepContext) -> tuple[tuple[int, str], ...]:
    """(step, URL) of earlier attempts' checkpoints, oldest first; this attempt owns them now."""
    shards = run.claim("checkpoint/").values()
    return tuple(sorted((s.result["step"], storage.join(run.root, s.root)) for s in shards))


def _note(row: dict[str, Any]) -> str:
    return f"loss {row['loss']:.3f}  {row['tokens_per_second']:,.0f} tokens/s"


def _measured(trained: dict[str, Any], hardware: Hardware) -> dict[str, Any]:
    return {
        "hardware": hardware.name,
        "devices": trained["devices"],
        "seconds": trained["seconds"],
        "compilations": trained["compilations"],
        "attention": f"{trained['backend']}: {trained['backend_reason']}",
        "notes": trained["notes"],
        "memory": trained["memory"],
    }


def _summary(checkpoint: str, rows: list[dict[str, Any]], entropy: float) -> dict[str, Any]:
    # An extension may be evaluated on other sets than the run that it continues was.
    name = next(row["set"] for row in rows if row["step"] == rows[-1]["step"])
    of_it = [row for row in rows if row["set"] == name]
    first, last = of_it[0], of_it[-1]
    per_byte = last.get("bits_per_byte")
    bits = "" if per_byte is None else f"; {per_byte:.3f} bits per byte"
    return {
        "checkpoint": checkpoint,
        "unigram_entropy": entropy,
        "first": first,
        "last": last,
        "held_out": [row for row in rows if row["step"] == last["step"]],
        "headline": [
            f"{name} loss {first['loss']:.3f} -> {last['loss']:.3f} nats per token over "
            f"{last['step']:,} steps (unigram entropy {entropy:.3f}{bits})"
        ],
    }
