"""Loss and bits per byte on a fixed list of validation batches.

The batches are the first sequences of the split in order, the same at every evaluation and for
every number of processes. Sums are weighted by token: every counted token weighs the same. When
the split ends before the last batch is full, the rest of that batch is masked.

Bits per byte divide the summed negative log-likelihood (in bits) by the UTF-8 bytes of the
predicted tokens, so models with different tokenizers can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np

from models.loss import nll_per_token
from models.precision import cast
from models.transformer import Transformer
from pipeline.errors import InputError
from training.boundaries import Boundaries
from training.config import TrainConfig
from training.job import Row
from training.mesh import Layout

Read = Callable[[np.ndarray, int], np.ndarray]
EvaluationStep = Callable[
    [Transformer, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]
]


@dataclass(frozen=True)
class EvaluationBatch:
    """Tokens int32 and mask float32 (1 = a real token), both [batch, position], on devices."""

    tokens: jax.Array
    mask: jax.Array


def plan_rows(tokens: int, config: TrainConfig) -> list[tuple[int, int]]:
    """(start, length) of every validation row; only the last may be shorter than the others."""
    length, room = config.sequence_length, config.batch_size * config.evaluate_batches
    sequences, left = divmod(tokens, length)
    rows = [(row * length, length) for row in range(min(sequences, room))]
    if len(rows) < room and left >= 2:
        rows.append((sequences * length, left))
    return rows


def validation_batches(
    tokens: int, read: Read, config: TrainConfig, layout: Layout
) -> list[EvaluationBatch]:
    """The fixed batches, each process reading only its own rows.

    Args:
        tokens: length of the validation split.
        read: (starts int64 [n], length) -> int32 [n, length], from the split's token array.
        config: batch size, sequence length and most batches.
        layout: where the batches go.

    Raises:
        InputError: when the split has fewer than two tokens.
    """
    rows = plan_rows(tokens, config)
    if not rows:
        raise InputError(
            f"the validation split has {tokens} tokens, at least 2 are needed; ask for more "
            "validation tokens"
        )
    size, mine = config.batch_size, config.batch_size // jax.process_count()
    first = jax.process_index() * mine
    batches = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size][first : first + mine]
        batches.append(_batch(part, mine, read, config, layout))
    return batches


def _batch(
    rows: list[tuple[int, int]], count: int, read: Read, config: TrainConfig, layout: Layout
) -> EvaluationBatch:
    tokens = np.zeros((count, config.sequence_length), np.int32)
    mask = np.zeros((count, config.sequence_length), np.float32)
    for length in sorted({length for _, length in rows}):
        at = [i for i, row in enumerate(rows) if row[1] == length]
        starts = np.array([rows[i][0] for i in at], np.int64)
        tokens[at, :length] = read(starts, length)
        mask[at, :length] = 1.0
    return EvaluationBatch(
        layout.place(tokens, config.batch_size), layout.place(mask, config.batch_size)
    )


def make_evaluation_step(
    config: TrainConfig, layout: Layout, backend: str, boundaries: Boundaries
) -> EvaluationStep:
    """Jitted (model, tokens, mask, token_bytes) -> sums of nll (nats), tokens, bytes of a batch."""

    def evaluation_step(
        model: Transformer, tokens: jax.Array, mask: jax.Array, token_bytes: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        with hax.axis_mapping(layout.compute):
            narrow = cast(model, jnp.dtype(config.compute_dtype))
            nll = nll_per_token(
                layout.gather_model(narrow),
                hax.named(tokens, ("batch", "position")),
                segment_ids=boundaries.segments(tokens),
                chunks=config.loss_chunks,
                backend=backend,
                placement=layout.placement,
                features_first=layout.platform == "tpu",
                unroll=config.unroll,
                gather=layout.gather_block,
            ).array
        # Position i predicts token i + 1; both must be real.
        counted = mask[:, :-1] * mask[:, 1:]
        target_bytes = token_bytes[tokens[:, 1:]] * counted.astype(jnp.int32)
        return jnp.sum(nll[:, :-1] * counted), jnp.sum(counted), jnp.sum(target_bytes)

    return jax.jit(evaluation_step, out_shardings=layout.replicated)


def evaluate(
    step: EvaluationStep,
    model: Transformer,
    batches: Sequence[EvaluationBatch],
    token_bytes: jax.Array,
) -> Row:
    """Mean loss in nats per token, bits_per_byte, and the tokens and bytes they are over.

    bits_per_byte is NaN when the predicted tokens have no bytes at all.
    """
    nll, tokens, size = 0.0, 0, 0
    for batch in batches:
        parts = jax.device_get(step(model, batch.tokens, batch.mask, token_bytes))
        nll, tokens, size = nll + float(parts[0]), tokens + int(parts[1]), size + int(parts[2])
    return {
        "loss": nll / tokens,
        "bits_per_byte": nll / math.log(2) / size if size else math.nan,
        "tokens": tokens,
        "bytes": size,
    }
