"""Scores checkpoints on all devices: loss on held-out splits, and generated samples."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from models.jax_numerics import fixed_numerics
from models.shape.config import TransformerConfig
from models.shape.validation import Count, check_value
from models.transformer import Transformer
from pipeline.errors import InputError
from training.checkpoint.restore import load_model_onto
from training.config import OptimizerConfig, Parallelism, TrainConfig
from training.config.job import MetricsRow, Prompts
from training.cost.memory_plan import resolve
from training.cost.resolved_run import attention_backend
from training.evaluate.evaluator import Evaluator, Split
from training.evaluate.generate_samples import SampleGenerator
from training.evaluate.loglikelihood import Likelihood
from training.sharding.layout import Layout, make_layout
from training.step.document_mask import Boundaries
from training.step.evaluation_step import make_evaluation_step
from training.step.program import described

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ScoreJob:
    """The evaluation of checkpoints of one model, as plain data that other processes can receive.

    Attributes:
        splits: name and shards of each split; may be empty.
        sequences: sequences to read of each split, spread over it; None for all.
        batch_size: sequences per batch; None for `TrainConfig.evaluation_batch`. Rounded up to a
            multiple of the devices that share a batch.
        token_bytes: number of UTF-8 bytes of every id.
        tokenizer: digest of the tokenizer that wrote the shards.
        prompts: prompts of generated samples; None for no samples.
        masked: whether ids are stored with a loss mask, see `training.step.document_mask`.
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

    def __post_init__(self) -> None:
        check_value("evaluation.sequences", self.sequences, Count | None)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Scores of one checkpoint.

    Attributes:
        rows: one metrics row per held-out split, see `Evaluator`.
        samples: one {"prompt", "completion"} per prompt.
    """

    rows: list[MetricsRow]
    samples: list[dict[str, str]]


class Scorer:
    """Scores any number of checkpoints; every program is compiled once. Close it after use.

    Every process creates one and calls it with the same arguments.

    Raises:
        InputError: a split is too small.
    """

    def __init__(self, job: ScoreJob, devices: Sequence[jax.Device] | None = None) -> None:
        train, self._layout = _placed(job.model, job.train, devices)
        self._job = job
        backend = attention_backend(job.model, train, self._layout.platform).backend
        ids = job.model.vocab_size
        boundaries = Boundaries(
            eos_id=job.eos_id,
            separate=train.separate_documents,
            masked_from=ids if job.masked else None,
        )
        self._evaluator = Evaluator(
            make_evaluation_step(train, self._layout, backend, boundaries),
            self._layout,
            job.splits,
            job.token_bytes,
            tokenizer=job.tokenizer,
            stored_ids=ids * (1 + job.masked),
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
        """The model of a checkpoint, on this scorer's devices."""
        return load_model_onto(self._layout, checkpoint, self._job.model)

    @fixed_numerics()
    def score(self, model: Transformer) -> Scored:
        """Losses and samples of a model that `load` returned."""
        samples = [] if self._generator is None else self._generator(model)
        return Scored(rows=self._evaluator(model), samples=samples)

    def close(self) -> None:
        self._evaluator.close()


def load_scored(
    checkpoint: str,
    model: TransformerConfig,
    train: TrainConfig,
    eos_id: int,
    *,
    batch_size: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> tuple[Likelihood, Transformer]:
    """A `Likelihood` and the model of a checkpoint, both on `devices` (default: all).

    Raises:
        InputError: the checkpoint is of another model.
        CorruptOutput: the checkpoint's files are missing or changed.
    """
    train, layout = _placed(model, train, devices)
    boundaries = Boundaries(eos_id=eos_id, separate=train.separate_documents)
    size = batch_size or train.evaluation_batch
    likelihood = Likelihood(model, train, layout, boundaries, batch_size=size)
    return likelihood, load_model_onto(layout, checkpoint, model)


def _placed(
    model: TransformerConfig, train: TrainConfig, devices: Sequence[jax.Device] | None
) -> tuple[TrainConfig, Layout]:
    """The configuration with every "auto" resolved for these devices, and their layout.

    Scores do not depend on the sharding, so when the parallelism of training does not fit these
    devices, the automatic one replaces it.
    """
    devices = devices or jax.devices()
    try:
        return _spread(model, train, devices)
    except InputError:
        if train.parallel == Parallelism():
            raise
    logger.warning(
        "%s of training does not fit the %d devices here; scoring with the automatic one",
        train.parallel,
        len(devices),
    )
    return _spread(model, dataclasses.replace(train, parallel=Parallelism()), devices)


def _spread(
    model: TransformerConfig, train: TrainConfig, devices: Sequence[jax.Device]
) -> tuple[TrainConfig, Layout]:
    # An evaluation has one batch shape, whatever the batches of training were.
    batch = {"batch_size": train.evaluation_batch, "microbatches": 1}
    train = dataclasses.replace(train, **batch, batch_schedule=(), length_schedule=())
    train, _ = resolve(model, OptimizerConfig(), train, described(devices))
    return train, make_layout(devices, train.parallel)
