"""Next-token cross-entropy as sums, so that means stay exact under gradient accumulation.

The target at position i is token i + 1 of the same row; the last position has none and never
counts. The mean over microbatches is (sum of totals) / (sum of counts), whatever each one counted.
The mask speaks of predictions: position i of `loss_mask` says whether predicting token i + 1
counts.
"""

from __future__ import annotations

from typing import Literal, Unpack

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from models.axes import BATCH, EMBED, POSITION, VOCAB
from models.cross_entropy import LOGIT_BUDGET_BYTES, chunk_count, token_losses
from models.transformer import Forward, Transformer

Chunks = int | Literal["auto"]


class Loss(eqx.Module):
    """Sums over the tokens that count; all float32 scalars.

    Attributes:
        total: sum of negative log-likelihoods, in nats.
        z: z_loss times the sum of squared log-sum-exps.
        count: number of tokens summed over.

    The objective of a step is (total + z) / count, each summed over everything in the step first.
    """

    total: jax.Array
    z: jax.Array
    count: jax.Array


def next_token_loss(
    model: Transformer,
    tokens: NamedArray,
    *,
    loss_mask: NamedArray | None = None,
    z_loss: float = 0.0,
    chunks: Chunks = 1,
    chunk_budget: int = LOGIT_BUDGET_BYTES,
    **forward: Unpack[Forward],
) -> Loss:
    """Loss of predicting every next token of each row.

    Args:
        model: the model, already cast to the compute dtype.
        tokens: int32 [batch, position].
        loss_mask: [batch, position], boolean or 0/1: whether the prediction made at a position
            (of the token after it) counts. Without it all but the last position count.
        z_loss: weight of the squared log-sum-exp (PaLM, Chowdhery et al., 2022, section 5: 1e-4).
        chunks: chunks of positions, a divisor of the row length; "auto" takes as many as keep one
            chunk's float32 logits within `chunk_budget` on each device that `sharding` names.
        chunk_budget: bytes, for "auto" only.
        **forward: see `models.transformer.Forward`.

    Raises:
        InputError: `chunks` does not divide the row length, or see `Transformer.hidden`.
    """
    nll, lse = _token_losses(model, tokens, chunks, chunk_budget, forward)
    weight = _predicts(tokens)
    if loss_mask is not None:
        weight = weight * loss_mask.rearrange(weight.axes).astype(jnp.float32)
    return Loss(
        total=hax.sum(nll * weight).array,
        z=z_loss * hax.sum(hax.square(lse) * weight).array,
        count=hax.sum(weight).array,
    )


def nll_per_token(
    model: Transformer,
    tokens: NamedArray,
    *,
    chunks: Chunks = 1,
    chunk_budget: int = LOGIT_BUDGET_BYTES,
    **forward: Unpack[Forward],
) -> NamedArray:
    """Negative log-likelihood in nats of token i + 1 at position i, float32 [batch, position].

    The last position is 0. Arguments as for `next_token_loss`.
    """
    nll, _ = _token_losses(model, tokens, chunks, chunk_budget, forward)
    return nll * _predicts(tokens)


def _token_losses(
    model: Transformer, tokens: NamedArray, chunks: Chunks, budget: int, forward: Forward
) -> tuple[NamedArray, NamedArray]:
    tokens = tokens.rearrange((BATCH, POSITION))
    hidden = model.hidden(tokens, **forward).rearrange((BATCH, POSITION, EMBED))
    if chunks == "auto":
        sharding = forward.get("sharding")
        shards = 1 if sharding is None else sharding.batch_shards
        batch, position = tokens.array.shape
        chunks = chunk_count(batch, position, model.Vocab.size, shards=shards, budget=budget)
    nll, lse = token_losses(
        hidden.array,
        model.output_head.rearrange((VOCAB, EMBED)).array,
        jnp.roll(tokens.array, -1, axis=1),
        model.config.logit_soft_cap,
        chunks,
    )
    return hax.named(nll, tokens.axes), hax.named(lse, tokens.axes)


def _predicts(tokens: NamedArray) -> NamedArray:
    """1.0 where a next token exists in the row, 0.0 at the last position; [batch, position]."""
    Position = tokens.resolve_axis(POSITION)
    inside = hax.arange(Position) < Position.size - 1
    return inside.astype(jnp.float32).broadcast_to((tokens.resolve_axis(BATCH), Position))
