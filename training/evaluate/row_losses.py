"""The loss of every row of a training batch under a checkpoint, by the evaluation's program.

A row's loss is the one that training takes: masked tokens and padding do not count, and documents
are separate if they were in training. Unlike in training nothing is updated, and the parameters are
those that the checkpoint publishes: the EMA where it has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from models.jax_numerics import fixed_numerics
from models.shape.config import TransformerConfig
from training.checkpoint.restore import load_model_onto
from training.config import TrainConfig
from training.cost.attention import attention_backend
from training.evaluate.checkpoint_scorer import placed
from training.evaluate.evaluator import fetch
from training.step.train_step import Boundaries, make_evaluation_step


@dataclass(frozen=True, kw_only=True)
class RowJob:
    """How the rows of one batch shape are scored; the flags are those of `Boundaries`."""

    model: TransformerConfig
    train: TrainConfig
    eos_id: int
    padded: bool
    masked: bool
    begins: bool


@fixed_numerics()
def row_losses(
    job: RowJob, checkpoint: str, rows: np.ndarray, devices: Sequence[jax.Device] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Summed nll in nats, float32 [row], and counted tokens, int32 [row], of one process.

    Takes stored ids, int32 [row, position], of `job.train.sequence_length` positions.

    Raises:
        CorruptOutput: the checkpoint's files are missing or changed.
    """
    train, layout = placed(job.model, job.train, devices)
    backend = attention_backend(job.model, train, layout.platform, layout.chip).backend
    boundaries = Boundaries(
        eos_id=job.eos_id,
        separate=train.separate_documents,
        padded=job.padded,
        masked_from=job.model.vocab_size if job.masked else None,
        begins=job.begins,
    )
    step = make_evaluation_step(train, layout, backend, boundaries)
    model = load_model_onto(layout, checkpoint, job.model)
    size = layout.whole_batch(min(train.evaluation_batch, len(rows)))
    # Only nll and counts are read: every id may be of no bytes.
    nothing = jax.device_put(np.zeros(job.model.vocab_size, np.int32), layout.replicated)

    def scored(start: int) -> tuple[jax.Array, ...]:
        part = rows[start : start + size]
        tokens, lengths = np.zeros((size, rows.shape[1]), np.int32), np.zeros(size, np.int32)
        tokens[: len(part)], lengths[: len(part)] = part, rows.shape[1]
        return step(model, layout.place(tokens, size), layout.place(lengths, size), nothing)[:2]

    parts = fetch(map(scored, range(0, len(rows), size)))
    nll, tokens = (np.concatenate([part[i] for part in parts])[: len(rows)] for i in (0, 1))
    return nll, tokens
