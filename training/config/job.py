"""The input and the result of one training run, as plain data without JAX.

A `TrainJob` can be sent to another process unchanged. It refers to data by directory and to
checkpoints by path, so its creator decides on their locations and which of them exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from models.generate.sampling_config import Sampling
from models.shape.config import TransformerConfig
from models.shape.validation import check_value
from pipeline.errors import InputError
from training.config.batch_schedule import batch_phases
from training.config.optimizer import OptimizerConfig
from training.config.train import TrainConfig

if TYPE_CHECKING:
    from data.batches.dataset import DatasetSpec
    from data.cache.token_shard import TokenShard

MetricsRow = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Start:
    """A checkpoint that a new run begins with, and the part of it that the run takes.

    "model" takes the published parameters, the EMA where the checkpoint has one: the optimizer's
    moments are zero, and step, schedule and data begin at 0. "moments" also takes the optimizer
    state with its counts. "everything" continues from the checkpoint: its step, data offset,
    history and EMA, with this run's number of steps and schedule. `step` is the checkpoint's for
    "everything", else 0.
    """

    checkpoint: str
    take: str
    step: int = 0

    def __post_init__(self) -> None:
        check_value("Start.take", self.take, Literal["model", "moments", "everything"])


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Texts that a model continues while it trains, with the same seed at every checkpoint.

    `tokenizer` is the URL of tokenizer.json; an empty prompt begins a document.
    """

    tokenizer: str
    prompts: tuple[str, ...]
    new_tokens: int = 64
    sampling: Sampling = Sampling(temperature=0.8, top_k=40)


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """One training run.

    Attributes:
        splits: name and shards of every split to evaluate on; empty for no evaluation.
        token_bytes: number of UTF-8 bytes of every id, for bits per byte.
        prompts: prompts to continue at every evaluation; None for no generated samples.
        padded: whether training sequences may end in padding.
        attempt: part of the checkpoints' names; differs among attempts that share the directory.
        resume_from: (step, path) of committed checkpoints of this run, oldest first.
        start: checkpoint to begin with if `resume_from` is empty; None for new parameters.
        forecast: fields of the forecast of its last loss, to be recorded; None for none.
        name: name of the run for trackers, the same for all its attempts.
        run_directory: directory of this attempt for `metrics.jsonl`, traces and trackers' files; if
            empty, metrics go next to the checkpoints, without traces and trackers.
        shared_directory: directory of what attempts share: compiled programs and trackers' files;
            empty for none.
    """

    model: TransformerConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    data: DatasetSpec
    splits: tuple[tuple[str, tuple[TokenShard, ...]], ...]
    token_bytes: tuple[int, ...]
    checkpoint_directory: str
    prompts: Prompts | None = None
    padded: bool = False
    attempt: str = "0"
    resume_from: tuple[tuple[int, str], ...] = ()
    start: Start | None = None
    forecast: MetricsRow | None = None
    name: str = ""
    run_directory: str = ""
    shared_directory: str = ""

    @property
    def least_done(self) -> int:
        """Steps that are done before this attempt, whichever checkpoint it begins with."""
        if self.resume_from:
            return self.resume_from[0][0]
        return self.start.step if self.start is not None else 0

    @property
    def metrics_directory(self) -> str:
        """The directory of this attempt's `metrics.jsonl`."""
        default = f"{self.checkpoint_directory.rstrip('/')}/metrics.{self.attempt}"
        return self.run_directory or default

    @property
    def compiled_directory(self) -> str:
        """Directory of the compiled programs that attempts share; empty for none."""
        return self.shared_directory and f"{self.shared_directory}/compiled"

    @property
    def build(self) -> str:
        """What tells the run from others of its name."""
        return self.shared_directory.rstrip("/").rpartition("/")[2]


class Listener:
    """Hears of a run, each method in process 0; those that a caller does not override do nothing.

    The events, with their fields: "corrupt_checkpoint", "failed_checkpoint", "resumed",
    "started_from", "learning_rate", "evaluation", "sample", "sequences", "forecast",
    "off_forecast", "tracker", "preempted", and in any process "watchdog".
    """

    def commit(self, step: int, path: str) -> None:
        """A checkpoint is complete: write its record. Called in a thread."""

    def drop(self, step: int, path: str) -> None:
        """A checkpoint will be deleted, or is corrupt and an older one sound: remove its record."""

    def progress(self, step: int, steps: int, row: MetricsRow) -> None:
        """The metrics of a step, every `log_every` steps."""

    def event(self, kind: str, **fields: Any) -> None:
        """Something else happened."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a run.

    Attributes:
        steps: steps done, including those before a resume.
        history: (directory, bytes) of every log of the run, for
            `training.metrics.metrics_log.read_history`.
        skipped: steps of these that were not applied, see `training.step.train_step`.
        checkpoint: path of the newest committed checkpoint; empty when preempted before the first.
        checkpoints: (step, path) of every committed checkpoint that was kept, oldest first.
        preempted: whether SIGTERM ended the run before its last step or last evaluation.
        devices: number of devices and JAX's name of their kind, such as "16 x TPU v6 lite".
        hardware: the fields of `training.cost.memory_plan.Devices`; of CPUs also "processor" and
            "cores", see `training.cost.host_cpu`.
        notes: choices of the program with reasons, and shapes that waste the chip.
        memory: estimated peak bytes of one device, by content.
        seconds: wall time of this attempt by phase; "total" is the sum.
        compilations: compilations of the train step; none for a phase whose step was loaded.
    """

    steps: int
    history: tuple[tuple[str, int], ...]
    skipped: int
    checkpoint: str
    checkpoints: list[tuple[int, str]]
    preempted: bool
    devices: str
    hardware: dict[str, Any]
    backend: str
    backend_reason: str
    notes: list[str]
    memory: dict[str, float]
    seconds: dict[str, float]
    compilations: int


def check_job(job: TrainJob) -> None:
    """Raise `InputError` unless a job can be run, before anything is started or compiled."""
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
    check_enough(job.train, sequences)
    steps = [step for step, _ in job.resume_from]
    if steps != sorted(steps):
        raise InputError(f"TrainJob.resume_from: expected steps in rising order, got {steps}")


def check_enough(train: TrainConfig, sequences: int) -> None:
    """Raise `InputError` where there are fewer `sequences` than one batch has."""
    batch = max(phase.rows for phase in batch_phases(train))
    if sequences < batch:
        raise InputError(
            f"TrainConfig.batch_size: {batch} sequences of {train.sequence_length} tokens are more "
            f"than the {sequences} sequences in the training tokens; lower it or sample more data"
        )
