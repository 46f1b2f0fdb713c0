"""A checkpoint's loss and bits per byte on a whole held-out split, on every device there is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import numpy as np

from data.cache import TokenShard
from data.token_array import TokenArray
from models.config import TransformerConfig
from training import distributed
from training.boundaries import Boundaries
from training.config import OptimizerConfig, TrainConfig
from training.distributed import Coordinator
from training.evaluation import evaluate, make_evaluation_step, validation_batches
from training.job import Row
from training.load import load_model_onto
from training.mesh import check_batch, make_layout
from training.program import attention_backend, resolved


@dataclass(frozen=True, kw_only=True)
class ScoreJob:
    """What to score.

    Attributes:
        checkpoint: path of a committed checkpoint.
        model: shape of the model in it.
        train: the configuration it was trained with: batch, sequence length, dtype.
        shards: of the split.
        token_bytes: UTF-8 bytes of every id.
        eos_id: the id that ends a document.
        tokenizer: digest of the tokenizer that wrote the shards.
    """

    checkpoint: str
    model: TransformerConfig
    train: TrainConfig
    shards: tuple[TokenShard, ...]
    token_bytes: tuple[int, ...]
    eos_id: int
    tokenizer: str = ""


def score(job: ScoreJob, *, coordinator: Coordinator | None = None) -> Row:
    """Loss in nats per token and bits per byte over every sequence of the split.

    Raises:
        InputError: the checkpoint is of another model, or the split has fewer than two tokens.
        DamagedOutput: the checkpoint's files are missing or changed.
    """
    distributed.initialize(coordinator)
    train, _ = resolved(job.model, OptimizerConfig(), job.train, jax.devices())
    job = dataclasses.replace(job, train=train)
    layout = make_layout(jax.devices(), train.parallel)
    check_batch(layout, job.train.batch_size, 1)
    backend, _ = attention_backend(job.model, train, jax.devices()[0].platform)
    boundaries = Boundaries(eos_id=job.eos_id, separate=job.train.separate_documents)
    with TokenArray(job.shards, job.model.vocab_size, tokenizer_digest=job.tokenizer) as tokens:
        everything = dataclasses.replace(job.train, evaluate_batches=len(tokens))
        batches = validation_batches(len(tokens), tokens.read, everything, layout)
    row = evaluate(
        make_evaluation_step(job.train, layout, backend, boundaries),
        load_model_onto(layout, job.checkpoint, job.model),
        batches,
        jax.device_put(np.asarray(job.token_bytes, np.int32), layout.replicated),
    )
    if coordinator is not None:
        distributed.shutdown()
    return row
