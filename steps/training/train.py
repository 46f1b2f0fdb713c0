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
from typing import TYPE_CHECKING, Annotated, Any

from models.shape.config import TransformerConfig
from pipeline import GangProcess, Hardware, InputError, Result, Runtime, StepContext, local, step
from pipeline.errors import Preempted
from pipeline.events import Emit, PhaseBegan, Progress, Warned
from pipeline.identity.fingerprint import plain_identity
from pipeline.store import storage
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import KEEP
from pipeline.store.shards import ATTEMPTS, File, wrong_sizes
from steps.artifacts import TRAIN, Checkpoint, Sequences
from steps.checkpoints.find import Continued, describe
from steps.declared import check_training
from steps.gang import FLAGS, TRACKING, joined
from steps.scaling_law.forecast import forecast_row, score, sentence
from steps.training.budget import check_budget, resolved, told_epochs
from steps.training.measured_step import measured_step
from steps.training.plan.continued import CHECKPOINTS, check_end
from steps.training.plan.facts import ELSEWHERE, training_facts
from training.config import OptimizerConfig, TrainConfig
from training.config.batch_schedule import kept_for_good, rows_read
from training.config.job import Listener, Prompts, Start, TrainJob

if TYPE_CHECKING:
    from training.metrics.goodput import AttemptTime

_LOG_SECONDS = 10.0  # between two lines of a training in its log

logger = logging.getLogger(__name__)


def _check(arguments: Mapping[str, Any]) -> None:
    check_budget(arguments)
    check_training(arguments, arguments["model"])


def _advise(config: Mapping[str, Any]) -> list[str]:
    return [warning] if (warning := config["train"].short_for_ema) else []


TRAINS: dict[str, Any] = {
    "cpus": 0,
    "advise": _advise,
    "elsewhere": ELSEWHERE,
    "environment": (*FLAGS, *TRACKING),
}
"""What steps that train declare alike."""


@step(output=Checkpoint, version=6, check=_check, facts=training_facts, **TRAINS)
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
        sequences: training data; `train` takes their length and seed where it sets none.
        train: batch size, intervals and, where `steps` is set, the budget.
        epochs: the budget otherwise, in passes over the sequences, rounded down to whole batches.
        tokens: the budget otherwise, in training tokens, rounded down to whole batches.
        splits: held-out splits to evaluate on during training; by default all but "test", which is
            reserved for the trained model. The result reports the loss on the first of them, which
            is validation if it exists.
        sample_prompts: texts that the model continues after each evaluation.
    """
    train = resolved(train, sequences, epochs, tokens)
    return run_training(run, sequences, model, optimizer, train, splits, sample_prompts, hardware)


def run_training(
    run: StepContext,
    sequences: Sequences,
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    splits: tuple[str, ...],
    prompts: tuple[str, ...],
    hardware: Hardware,
    *,
    start: Start | None = None,
    continued: Continued | None = None,
    first_steps: int = 0,
) -> dict[str, Any]:
    """The body of all steps that train; `first_steps` (0: all) as of `Checkpoint.first_steps`.

    `continued` is what the checkpoint of `start` is of.
    """
    from data.batches.dataset import epochs
    from training.metrics.metrics_log import content_of, plain, read_history, write_history

    cache = sequences.cache
    named = cache.named_splits(splits or cache.validation_splits)
    if not named:
        raise InputError(
            f"{cache.path}: no validation tokens, which the loss curve needs; "
            'sample with splits=(("validation", tokens),)'
        )
    check_end(sequences, train)
    settings = model, optimizer, train
    earlier = run.claim(CHECKPOINTS).values()  # this attempt becomes their owner
    saved = ((shard.result["step"], storage.join(run.root, shard.root)) for shard in earlier)
    job = TrainJob(
        model=model,
        optimizer=optimizer,
        train=train,
        data=sequences.dataset(),
        splits=named,
        prompts=Prompts(tokenizer=cache.tokenizer().file, prompts=prompts) if prompts else None,
        token_bytes=tuple(cache.token_bytes().tolist()),
        padded=sequences.padded,
        checkpoint_directory=storage.join(run.directory, "checkpoints"),
        attempt=run.attempt,
        resume_from=tuple(sorted(saved)),
        start=start,
        forecast=None if earlier or start else forecast_row(run.root, sequences, *settings, splits),
        name=run.root.rpartition("/")[2],
        run_directory=run.keep,
        shared_directory=storage.join(run.root, "shared", run.ledger.build),
    )
    describe(run, sequences, model, train, continued)
    passes = epochs(job.data, rows_read(train, train.steps))
    for warning in filter(None, (train.short_for_ema, told_epochs(passes))):
        run.warn(warning)
    trained = run.gang(hardware, train_process, (job, run.ledger))
    _declare_checkpoints(run, trained["checkpoints"])
    history = trained["history"]
    storage.delete_tree(job.compiled_directory)  # a finished run has no restart
    with run.shard("record", {"content": content_of(history)}) as directory:
        attempts = attempts_of(run.root, job.build)
        write_history(directory, history, map(dataclasses.asdict, attempts))
    entropy = cache.result["splits"][TRAIN]["unigram_entropy"]
    evaluations = [plain(entry) for entry in read_history(history, ["evaluation"])]
    summary = _summary(trained["checkpoint"], evaluations, entropy, trained["skipped"])
    scored = {} if start else score(read_history(history, ["forecast"]), summary["last"])
    summary["headline"] += [sentence(each) for each in scored.values()]
    if skipped := trained["skipped"]:
        run.warn(
            f"{skipped:,} of {train.steps:,} updates were not applied (column `skipped` of "
            "metrics.jsonl): not finite, a loss spike, or no counted token"
        )
    timed = measured_step(run, settings, trained, attempts)
    return {
        **summary,
        "model": plain_identity(model),
        "train": plain_identity(train),
        "first_steps": first_steps or train.steps,
        "epochs": list(passes),
        "measured": {"hardware": hardware.name, **_measured(trained, train), **scored, **timed},
    }


def _measured(trained: dict[str, Any], train: TrainConfig) -> dict[str, Any]:
    identity, names = plain_identity(train), ("devices", "seconds", "compilations")
    return {
        **{name: trained[name] for name in (*names, "notes", "memory")},
        "attention": f"{trained['backend']}: {trained['backend_reason']}",
        "runtime": {k: v for k, v in dataclasses.asdict(train).items() if k not in identity},
    }


def _summary(
    checkpoint: str, rows: list[dict[str, Any]], entropy: float, skipped: int
) -> dict[str, Any]:
    """Losses of the run's first and last evaluation, skipped updates, and the headline."""
    # An extended run may evaluate on other splits than the run that it continues: take the first
    # split of the last evaluation.
    name = next(row["split"] for row in rows if row["step"] == rows[-1]["step"])
    of_split = [row for row in rows if row["split"] == name]
    first, last = of_split[0], of_split[-1]
    per_byte = last.get("bits_per_byte")
    bits = "" if per_byte is None else f"; {per_byte:.3f} bits per byte"
    bits += f"; {skipped:,} updates not applied" if skipped else ""
    return {
        "checkpoint": checkpoint,
        "skipped": skipped,
        "unigram_entropy": entropy,
        "first": first,
        "last": last,
        "evaluations": [row for row in rows if row["step"] == last["step"]],
        "headline": [
            f"{name} loss {first['loss']:.3f} -> {last['loss']:.3f} nats per token over "
            f"{last['step']:,} steps (unigram entropy {entropy:.3f}{bits})"
        ],
    }


def attempts_of(root: str, build: str) -> list[AttemptTime]:
    """The attempts at one build of a step's output, by their metrics logs."""
    from training.metrics.goodput import read_attempts

    above = storage.join(root, ATTEMPTS)
    names = storage.list_names(above)
    return read_attempts((storage.join(above, name, KEEP) for name in names), build)


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


def train_process(
    work: tuple[TrainJob, Ledger], *, process: GangProcess, emit: Emit
) -> dict[str, Any]:
    """One process of the gang: the training loop, whose checkpoints it records in the ledger."""
    entered, began = time.time(), time.perf_counter()
    emit(PhaseBegan("importing"))
    from training.metrics.stopwatch import Stopwatch
    from training.trainer.trainer import train as train_loop

    # The engine may run on another machine, whose clock may be ahead: clamp to 0.
    starting = max(0.0, entered - process.started)
    before = {"starting": starting, "importing": time.perf_counter() - began}

    emit(PhaseBegan("restoring and compiling"))
    job, ledger = work
    watch = Stopwatch(before=before)
    with joined(process):
        watch.ended("joining")
        result = train_loop(job, _Recorder(job, ledger, emit), watch)
    if result.preempted:
        raise Preempted(f"preempted after step {result.steps}; the next attempt resumes from there")
    return {
        **dataclasses.asdict(result),
        "checkpoint": shard_name(result.steps),
        "checkpoints": [shard_name(step) for step, _ in result.checkpoints],
    }


class _Recorder(Listener):
    def __init__(self, job: TrainJob, ledger: Ledger, emit: Emit) -> None:
        self._job, self._ledger, self._emit = job, ledger, emit
        self._logged = -_LOG_SECONDS

    def commit(self, step: int, path: str) -> None:
        record_checkpoint(self._ledger, self._job.train, step, path)

    def drop(self, step: int, path: str) -> None:
        drop_checkpoint(self._ledger, step, path, self._job.attempt)

    def progress(self, step: int, steps: int, row: dict[str, Any]) -> None:
        # The average, as one step's rate says little beside the run's own steps per second.
        note = f"loss {row['loss']:.3f}  {row['tokens_per_second_average']:,.0f} tokens/s"
        self._emit(Progress(step, steps, "steps", note))
        if (now := time.monotonic()) - self._logged >= _LOG_SECONDS or step == steps:
            self._logged = now
            logger.info("step %d of %d: %s", step, steps, note)

    def event(self, kind: str, **fields: Any) -> None:
        match kind:
            case "resumed":
                self._emit(PhaseBegan(f"resumed from step {fields['step']}"))
            case "corrupt_checkpoint":
                self._warn(f"corrupt checkpoint: {fields['reason']}")
            case "failed_checkpoint":
                text = f"checkpoint of step {fields['step']} failed, the next will be saved"
                self._warn(f"{text}: {fields['reason']}")
            case "evaluation" if not math.isfinite(fields["loss"]):
                step, split, loss = (fields[name] for name in ("step", "split", "loss"))
                self._warn(f"step {step}: the loss on {split} is {loss}")
            case "learning_rate" | "tracker" | "off_forecast":
                self._warn(fields["reason"])
            case "watchdog":
                name = f"process-{fields['process']}.txt"
                url = storage.join(self._job.run_directory, "stacks", name)
                storage.write_atomic(url, fields["report"].encode())
                self._warn(f"{fields['report'].partition(chr(10))[0]}; see {url}")

    def _warn(self, message: str) -> None:
        self._emit(Warned(message))


def record_checkpoint(ledger: Ledger, train: TrainConfig, step: int, path: str) -> None:
    """Record a complete checkpoint, from which the next attempt can resume.

    The record's name depends on the step alone, so a newer attempt replaces the record that an
    older attempt has of the same step: the older attempt may still run and delete its own files.
    """
    from training.checkpoint.files import content_of, measured, read_index

    index = read_index(path)
    name, files = shard_name(step), [File(*file, "") for file in measured(index)]
    # Which checkpoints exist only for resuming depends on when attempts ended, so the content
    # digest of the output leaves them out.
    kept = kept_for_good(step, train)
    result = {
        "step": step,
        "content": content_of(index) if kept else None,
        "progress": f"step {step:,} of {train.steps:,} saved",
    }
    ledger.add(name, path, result, files, replace=True)


def drop_checkpoint(ledger: Ledger, step: int, path: str, attempt: str) -> None:
    """Remove the record of the checkpoint at `path`; a record of another path stays."""
    recorded = ledger.find(shard_name(step))
    if recorded is not None and storage.join(ledger.root, recorded.root) == path.rstrip("/"):
        ledger.drop(recorded.name, attempt)


def shard_name(step: int) -> str:
    """Name of a step's checkpoint in ledger and manifest, the same for all attempts."""
    return f"{CHECKPOINTS}{step:08d}"
