"""What one training run is given and what it gives back: plain data, no JAX.

A `TrainJob` can be sent to another process as it is. It names data by directory and checkpoints by
path, so whoever builds it decides where things are and which of them exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.config import TransformerConfig
from pipeline.errors import InputError
from training.config.batch_schedule import batch_phases
from training.config.optimizer import OptimizerConfig
from training.config.train import TrainConfig
from training.config.validation import one_of

if TYPE_CHECKING:
    from data.batches.dataset import DatasetSpec
    from data.cache.token_shard import TokenShard
    from training.config.prompts import Prompts

MetricsRow = dict[str, Any]


TAKES = ("model", "moments", "everything")


@dataclass(frozen=True, kw_only=True)
class Start:
    """A trained checkpoint that a new run begins with; says what of it is taken, and nothing else.

    "model" takes the parameters: the optimizer's moments are zero and step, schedule and data begin
    at 0. "moments" takes the optimizer's state too, its counts included. "everything" continues
    where the checkpoint stopped: its step, data position, history and average, under this run's
    number of steps and schedule.

    Attributes:
        checkpoint: path of a committed checkpoint.
        take: "model", "moments" or "everything".
    """

    checkpoint: str
    take: str

    def __post_init__(self) -> None:
        one_of("Start", "take", self.take, TAKES)


@dataclass(frozen=True, kw_only=True)
class KeptProgram:
    """A compiled step in the store.

    Attributes:
        path: URL of its one file, in a directory of its own.
        size: bytes.
        sha256: of the file, in hex.
        made_for: what it was compiled from and for: program, versions, devices, flags.
    """

    path: str
    size: int
    sha256: str
    made_for: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """One training run.

    Attributes:
        model: shape of the model.
        optimizer: AdamW and its schedule.
        train: steps, batches and cadence.
        data: the training sequences and their order.
        held_out: name and shards of every held-out set to evaluate on; empty for no evaluation.
        token_bytes: UTF-8 bytes of every id, for bits per byte.
        checkpoint_directory: where checkpoints are written.
        prompts: what to write after at every evaluation; None for nothing.
        padded: whether training sequences may end in padding.
        attempt: part of their names, different for every run that shares the directory.
        resume_from: (step, path) of committed checkpoints of this run, oldest first.
        start: what a run with nothing to resume from begins with; None for new parameters.
        name: of the run, the same for all attempts at it; for trackers.
        run_directory: of this attempt, for `metrics.jsonl`, traces and trackers' files; empty for
            a directory beside the checkpoints, and neither traces nor trackers.
        journal_directory: of all attempts' accounts of their time; empty for none.
        programs: compiled steps of earlier attempts, oldest first.
        program_directory: of this attempt, for its compiled steps; empty to keep and load none.
    """

    model: TransformerConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    data: DatasetSpec
    held_out: tuple[tuple[str, tuple[TokenShard, ...]], ...]
    token_bytes: tuple[int, ...]
    checkpoint_directory: str
    prompts: Prompts | None = None
    padded: bool = False
    attempt: str = "0"
    resume_from: tuple[tuple[int, str], ...] = ()
    start: Start | None = None
    name: str = ""
    run_directory: str = ""
    journal_directory: str = ""
    programs: tuple[KeptProgram, ...] = ()
    program_directory: str = ""

    @property
    def metrics_directory(self) -> str:
        """Where `metrics.jsonl` of this attempt is."""
        beside = f"{self.checkpoint_directory.rstrip('/')}/metrics.{self.attempt}"
        return self.run_directory or beside


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run did.

    Attributes:
        steps: steps done, counted from the very first one.
        history: where the run's rows are: (directory, bytes) of every metrics log that they are
            in, for `training.metrics.history.read_history`. Of kind "step" one a step, those
            before a resume included (see `training.metrics.recorder`); "evaluation" one a held-out
            set with step, set, loss (nats per token), bits_per_byte (of text), tokens, bytes;
            "sample" with step, prompt, completion.
        checkpoint: path of the newest committed checkpoint; empty when preempted before the first.
        checkpoints: (step, path) of every committed checkpoint that was kept, oldest first.
        preempted: a termination signal ended the run before its last step.
        devices: count and JAX's name of what it ran on, such as "16 x TPU v6 lite".
        backend: attention back end used; `backend_reason` says why that one.
        notes: what the program chose and why, and shapes that waste the chip, one sentence each.
        memory: estimated bytes of a device at the fullest moment, by what they hold.
        seconds: wall time of this run by part; "total" is all of it.
        compilations: of the train step: one for each phase of the schedules of batch and length
            that had steps to do, so 1 for most runs; none where an earlier attempt's was loaded.
    """

    steps: int
    history: tuple[tuple[str, int], ...]
    checkpoint: str
    checkpoints: list[tuple[int, str]]
    preempted: bool
    devices: str
    backend: str
    backend_reason: str
    notes: list[str]
    memory: dict[str, float]
    seconds: dict[str, float]
    compilations: int


def check_job(job: TrainJob) -> None:
    """Refuse what cannot be trained, before anything is started or compiled.

    Raises:
        InputError: vocabularies differ, or there is less data than one batch.
    """
    data, vocab_size = job.data, job.data.vocab_size
    if job.model.vocab_size != vocab_size:
        raise InputError(
            f"TransformerConfig.vocab_size is {job.model.vocab_size}, the tokenizer has "
            f"{vocab_size} ids; set the model's vocab_size to {vocab_size} (vocab_multiple pads "
            "its tables)"
        )
    if len(job.token_bytes) != vocab_size:
        raise InputError(
            f"TrainJob.token_bytes: expected {vocab_size} entries, one per id, got "
            f"{len(job.token_bytes)}; take them from the tokenizer that wrote the tokens"
        )
    length = job.train.sequence_length
    if not job.train.steps:
        raise InputError("TrainConfig.steps: expected how many steps to train, found 0")
    batch = max(phase.rows for phase in batch_phases(job.train))
    if data.sequence_length != length:
        raise InputError(
            f"TrainConfig.sequence_length is {length}, the shuffled sequences are "
            f"{data.sequence_length} tokens long; give both the same length"
        )
    sequences = 0
    for source in data.sources:
        tokens = sum(shard.tokens for shard in source.shards)
        if tokens < length:
            raise InputError(
                f"TrainConfig.sequence_length: {length} is more than the {tokens} training tokens "
                f"of {source.name}; shorten it or sample more data"
            )
        sequences += tokens // length
    if sequences < batch:
        raise InputError(
            f"TrainConfig.batch_size: {batch} sequences of {length} tokens are more than the "
            f"{sequences} sequences in the training tokens; lower it or sample more data"
        )
    steps = [step for step, _ in job.resume_from]
    if steps != sorted(steps):
        raise InputError(f"TrainJob.resume_from: expected steps in rising order, got {steps}")
