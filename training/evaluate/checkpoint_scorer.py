"""Scores checkpoints on all devices: loss on held-out splits or of rows, and generated samples.

The processes that follow a training loop together: process 0 looks for the next checkpoint, and one
all-gather shares its result and whether any process was asked to stop.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.experimental import multihost_utils

from models.jax_numerics import fixed_numerics
from models.shape.config import TransformerConfig
from models.shape.validation import Count, check_value
from models.transformer import Transformer
from pipeline.errors import CorruptOutput, InputError, StorageError, StoreUnavailable
from training.checkpoint.restore import load_model_onto
from training.config import OptimizerConfig, Parallelism, TrainConfig
from training.config.job import MetricsRow, Prompts
from training.cost.attention import attention_backend
from training.cost.memory_plan import resolve
from training.evaluate.evaluator import Evaluator, SequenceSpans, Split, fetch, read_batches
from training.evaluate.generate_samples import SampleGenerator
from training.evaluate.loglikelihood import Likelihood
from training.fault import StopSignal
from training.sharding.layout import Layout, make_layout
from training.step.program import described
from training.step.train_step import Boundaries, EvaluationStep, make_evaluation_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ScoreJob:
    """The evaluation of checkpoints of one model, as plain data; see `Evaluator`.

    Attributes:
        batch_size: sequences per batch; None for `TrainConfig.evaluation_batch`.
        masked, begins: whether ids are stored with a loss mask, and with the beginnings of
            conversations, see `training.step.train_step`.
    """

    model: TransformerConfig
    train: TrainConfig
    splits: tuple[Split, ...]
    sequences: int | None = None
    batch_size: int | None = None
    token_bytes: tuple[int, ...]
    eos_id: int
    tokenizer: str = ""
    prompts: Prompts | None = None
    masked: bool = False
    begins: bool = False

    def __post_init__(self) -> None:
        check_value("evaluation.sequences", self.sequences, Count | None)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Both lists of `Evaluator`, with a row per split; {"prompt", "completion"} per prompt."""

    rows: list[MetricsRow]
    samples: list[dict[str, str]]
    sequences: list[MetricsRow] = field(default_factory=list)


class Scorer:
    """Scores any number of checkpoints; every program is compiled once. Close it after use.

    Every process creates one and calls it with the same arguments.
    """

    def __init__(self, job: ScoreJob, devices: Sequence[jax.Device] | None = None) -> None:
        flags = {"masked": job.masked, "begins": job.begins}
        step, train, self._layout = evaluation_on(
            devices, job.model, job.train, job.eos_id, **flags
        )
        self._job = job
        self._evaluator = Evaluator(
            step,
            self._layout,
            job.splits,
            job.token_bytes,
            tokenizer=job.tokenizer,
            stored_ids=job.model.vocab_size * (1 + job.masked + job.begins),
            sequence_length=train.sequence_length,
            batch_size=job.batch_size or train.evaluation_batch,
            sequences=job.sequences,
        )
        self._generator = None
        if job.prompts is not None:
            dtype = train.compute_dtype
            self._generator = SampleGenerator(job.prompts, job.model, self._layout, dtype)

    @fixed_numerics()
    def load(self, checkpoint: str) -> Transformer:
        return load_model_onto(self._layout, checkpoint, self._job.model)

    @fixed_numerics()
    def score(self, model: Transformer) -> Scored:
        samples = [] if self._generator is None else self._generator(model)
        rows, sequences = self._evaluator(model)
        return Scored(rows=rows, samples=samples, sequences=sequences)

    def close(self) -> None:
        self._evaluator.close()


def evaluation_on(
    devices: Sequence[jax.Device] | None,
    model: TransformerConfig,
    train: TrainConfig,
    eos_id: int,
    *,
    masked: bool,
    begins: bool,
    padded: bool = False,
) -> tuple[EvaluationStep, TrainConfig, Layout]:
    """The step of `make_evaluation_step` on devices (None for all), and what `placed` gives.

    The flags are those of `training.step.train_step.Boundaries`.
    """
    train, layout = placed(model, train, devices)
    backend = attention_backend(model, train, layout.platform, layout.chip).backend
    boundaries = Boundaries(
        eos_id=eos_id,
        separate=train.separate_documents,
        padded=padded,
        masked_from=model.vocab_size if masked else None,
        begins=begins,
    )
    return make_evaluation_step(train, layout, backend, boundaries), train, layout


def load_scored(
    checkpoint: str,
    model: TransformerConfig,
    train: TrainConfig,
    eos_id: int,
    *,
    batch_size: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[Likelihood, Transformer]:
    """A `Likelihood` and the model of a checkpoint, both on `devices` (default: all)."""
    train, layout = placed(model, train, devices)
    boundaries = Boundaries(eos_id=eos_id, separate=train.separate_documents)
    size = batch_size or train.evaluation_batch
    likelihood = Likelihood(model, train, layout, boundaries, batch_size=size)
    return likelihood, load_model_onto(layout, checkpoint, model)


def placed(
    model: TransformerConfig, train: TrainConfig, devices: Sequence[jax.Device] | None
) -> tuple[TrainConfig, Layout]:
    """The configuration with every "auto" resolved for these devices, and their layout.

    Scores do not depend on the sharding, so when the parallelism of training does not fit these
    devices, the automatic one replaces it.
    """
    devices = devices or jax.devices()
    # An evaluation has one batch shape, whatever the batches of training were.
    batch = {"batch_size": train.evaluation_batch, "microbatches": 1}
    train = dataclasses.replace(train, **batch, batch_schedule=(), length_schedule=())
    try:
        found, _ = resolve(model, OptimizerConfig(), train, described(devices))
        return found, make_layout(devices, found.parallel)
    except InputError:
        if train.parallel == Parallelism():
            raise
    logger.warning(
        "%s of training does not fit the %d devices here; scoring with the automatic one",
        train.parallel,
        len(devices),
    )
    return placed(model, dataclasses.replace(train, parallel=Parallelism()), devices)


@fixed_numerics()
def row_losses(
    checkpoint: str,
    rows: np.ndarray,
    model: TransformerConfig,
    train: TrainConfig,
    eos_id: int,
    **flags: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Summed nll in nats, float32 [row], and counted tokens, int32 [row], of one process.

    Takes the stored ids of a training batch, int32 [row, position], and the flags of
    `evaluation_on`. A row's loss is the one that training takes: masked tokens and padding do not
    count, and documents are separate if they were in training. The parameters are those that the
    checkpoint publishes: the EMA where it has one.
    """
    step, train, layout = evaluation_on(None, model, train, eos_id, **flags)
    trained = load_model_onto(layout, checkpoint, model)
    size = layout.whole_batch(min(train.evaluation_batch, len(rows)))
    # Only nll and counts are read: every id may be of no bytes.
    nothing = jax.device_put(np.zeros(model.vocab_size, np.int32), layout.replicated)
    spans = SequenceSpans(np.arange(len(rows)), np.full(len(rows), rows.shape[1]))
    batches = read_batches(spans, lambda at, _: rows[at], rows.shape[1], size, layout)
    parts = fetch(step(trained, *batch, nothing)[:2] for batch in batches)
    nll, tokens = (np.concatenate([part[i] for part in parts])[: len(rows)] for i in (0, 1))
    return nll, tokens


LOOK_SECONDS = 1.0
MOST_FAILED_LOOKS = 5
_MESSAGE_BYTES = 4096


@dataclass(frozen=True)
class Next:
    """What process 0 found: a checkpoint to score, the end, or neither (poll again later)."""

    name: str = ""
    step: int = 0
    path: str = ""
    end: bool = False


def follow(
    scorer: Scorer,
    find: Callable[[], Next],
    keep: Callable[[Next, Scored], None],
    skip: Callable[[Next, str], None],
) -> bool:
    """Score checkpoints until the end; False when SIGTERM cancelled the loop before.

    Process 0 calls `find` repeatedly for the next checkpoint, `keep` with its scores before it
    calls `find` again, and `skip` with one that is missing or corrupt, and the reason.

    Raises:
        StoreUnavailable: the store failed `MOST_FAILED_LOOKS` times in a row.
    """
    leader = jax.process_index() == 0
    failed = 0
    # Every process notes its own signal, which `_share` passes to the others.
    with StopSignal(many_processes=False) as stop:
        while True:
            found, cancelled = _share(find() if leader else Next(), stop.requested())
            if cancelled or found.end:
                return not cancelled
            if not found.path:
                time.sleep(LOOK_SECONDS)
                continue
            try:  # if one process cannot read a checkpoint, all of them raise the same class
                model = scorer.load(found.path)
            except CorruptOutput as error:
                if leader:
                    skip(found, " ".join(str(error).split()))
            except (StorageError, OSError) as error:
                failed += 1
                if failed == MOST_FAILED_LOOKS:
                    raise StoreUnavailable(
                        f"{found.path}: failed {failed} times in a row: {error}"
                    ) from error
                logger.warning("%s: will be read again: %s", found.path, error)
                time.sleep(LOOK_SECONDS)
                continue
            else:
                scored = scorer.score(model)
                del model  # free its memory before the next one is read
                if leader:
                    keep(found, scored)
            failed = 0


def _share(found: Next, stop: bool) -> tuple[Next, bool]:
    """What process 0 found, and whether any process was asked to stop, in all processes."""
    if jax.process_count() == 1:
        return found, stop
    fields = json.dumps([found.name, found.step, found.path, found.end]).encode()
    message = np.zeros(_MESSAGE_BYTES, np.uint8)
    message[: len(fields)] = np.frombuffer(fields, np.uint8)
    message[-1] = stop
    messages = multihost_utils.process_allgather(message)
    words = json.loads(bytes(messages[0, :-1]).rstrip(b"\0"))
    return Next(*words), bool(messages[:, -1].any())
