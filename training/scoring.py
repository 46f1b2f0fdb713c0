"""A checkpoint's loss and bits per byte on a whole held-out split, on every device there is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import numpy as np

from data.token_array import TokenArray
from models.attention import choose_backend
from models.config import TransformerConfig
from training import distributed
from training.config import TrainConfig
from training.distributed import Coordinator
from training.evaluation import evaluate, make_evaluation_step, validation_batches
from training.job import Row, Shards
from training.load import load_model_onto
from training.mesh import check_batch, make_layout


@dataclass(frozen=True, kw_only=True)
class ScoreJob:
    """What to score.

    Attributes:
        checkpoint: path of a committed checkpoint.
        model: shape of the model in it.
        train: the configuration it was trained with: batch, sequence length, dtype.
        shards: (directory, tokens) of the split.
        token_bytes: UTF-8 bytes of every id.
    """

    checkpoint: str
    model: TransformerConfig
    train: TrainConfig
    shards: Shards
    token_bytes: tuple[int, ...]


def score(job: ScoreJob, *, coordinator: Coordinator | None = None) -> Row:
    """Loss in nats per token and bits per byte over every sequence of the split.

    Raises:
        InputError: the checkpoint is of another model, or the split has fewer than two tokens.
        DamagedOutput: the checkpoint's files are missing or changed.
    """
    distributed.initialize(coordinator)
    layout = make_layout(jax.devices(), job.train.fsdp)
    check_batch(layout, job.train.batch_size, 1)
    backend, _ = choose_backend(
        job.train.attention,
        jax.devices()[0].platform,
        position=job.train.sequence_length,
        head_size=job.model.head_size,
    )
    tokens = TokenArray(job.shards, vocab_size=job.model.vocab_size)
    everything = dataclasses.replace(job.train, evaluate_batches=len(tokens))
    row = evaluate(
        make_evaluation_step(job.train, layout, backend),
        load_model_onto(layout, job.checkpoint, job.model),
        validation_batches(len(tokens), tokens.read, everything, layout),
        jax.device_put(np.asarray(job.token_bytes, np.int32), layout.replicated),
    )
    if coordinator is not None:
        distributed.shutdown()
    return row
