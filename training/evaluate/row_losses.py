"""The loss of every row of a training batch under a checkpoint, by the evaluation's program.

A row's loss is the one that training takes: masked tokens and padding do not count, and documents
are separate if they were in training. Unlike in training nothing is updated, and the parameters are
those that the checkpoint publishes: the EMA where it has one.
"""

from __future__ import annotations

import jax
import numpy as np

from models.jax_numerics import fixed_numerics
from models.shape.config import TransformerConfig
from training.checkpoint.restore import load_model_onto
from training.config import TrainConfig
from training.evaluate.checkpoint_scorer import evaluation_on
from training.evaluate.evaluator import SequenceSpans, fetch, read_batches


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

    Takes stored ids, int32 [row, position], of `train.sequence_length` positions, and the flags of
    `evaluation_on`.
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
