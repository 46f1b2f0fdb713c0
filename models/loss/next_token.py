"""Next-token cross-entropy as sums, so that means stay exact under gradient accumulation.

The target at position i is token i + 1 of the same sequence; the last position has no target and
never counts. The mean over microbatches is (sum of totals) / (sum of counts).
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp

import models.named as hax
from models.layers.axes import BATCH, EMBED, POSITION, VOCAB
from models.loss.cross_entropy import LossOptions, summed_losses, token_losses
from models.named import NamedArray
from models.shape.footprint import LOGIT_BUDGET_BYTES, chunk_count
from models.transformer import DEFAULT, Forward, Transformer


class Loss(eqx.Module):
    """Weighted sums over tokens; all float32 scalars.

    The loss of a step is objective / count, each summed over all microbatches of the step first.
    """

    objective: jax.Array  # total + z, the only differentiable sum
    total: jax.Array  # of negative log-likelihoods, in nats
    z: jax.Array  # z_loss times the sum of squared log-sum-exps
    count: jax.Array  # of token weights


def next_token_loss(
    model: Transformer,
    tokens: NamedArray,
    *,
    loss_mask: NamedArray | None = None,
    segment_ids: NamedArray | None = None,
    z_loss: float = 0.0,
    chunks: int = 1,
    forward: Forward = DEFAULT,
) -> Loss:
    """Loss of predicting every next token of each sequence.

    Args:
        model: the model, already cast to the compute dtype.
        tokens: int32 [batch, position].
        loss_mask: [batch, position], boolean or float: the weight of the prediction made at a
            position (of the token after it). Default: all positions but the last count.
        segment_ids: see `Transformer.hidden`.
        z_loss: weight of the squared log-sum-exp (PaLM, Chowdhery et al., 2022, section 5: 1e-4).
        chunks: number of chunks of positions, a divisor of one device's part of a sequence.
    """
    tokens = tokens.rearrange((BATCH, POSITION))
    weight = _has_target(tokens)
    if loss_mask is not None:
        weight = weight * loss_mask.rearrange(weight.axes).astype(jnp.float32)
    arrays = _inputs(model, tokens, segment_ids, forward)
    cap, ids = model.config.logit_soft_cap, _id_count(model)
    options = LossOptions(z_loss, cap, chunks, forward.mesh_axes, ids)
    objective, total, z = summed_losses(*arrays, weight.array, options)
    return Loss(objective=objective, total=total, z=z, count=hax.sum(weight).array)


def score_tokens(
    model: Transformer,
    tokens: NamedArray,
    *,
    segment_ids: NamedArray | None = None,
    budget: int = LOGIT_BUDGET_BYTES,
    forward: Forward = DEFAULT,
) -> tuple[NamedArray, NamedArray]:
    """Negative log-likelihood in nats of token i + 1 at position i, float32 [batch, position].

    Also, boolean [batch, position], whether no other token has a larger logit. The logits are
    computed in the fewest chunks of positions that fit `budget` bytes of float32 on each device.
    """
    tokens = tokens.rearrange((BATCH, POSITION))
    batch, position = tokens.array.shape
    shards, mesh_axes = 1, forward.mesh_axes
    if mesh_axes is not None:
        shards = mesh_axes.shards(mesh_axes.batch)
        position //= mesh_axes.shards(mesh_axes.sequence)
    chunks = chunk_count(batch, position, model.Vocab.size, shards=shards, budget=budget)
    cap, ids = model.config.logit_soft_cap, _id_count(model)
    options = LossOptions(soft_cap=cap, chunks=chunks, id_count=ids)
    nll, best = token_losses(*_inputs(model, tokens, segment_ids, forward), options)
    return hax.named(nll, tokens.axes) * _has_target(tokens), hax.named(best, tokens.axes)


def _inputs(
    model: Transformer, tokens: NamedArray, segment_ids: NamedArray | None, forward: Forward
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden states [embed, batch, position], head [vocab, embed] and targets, as arrays."""
    hidden = model.hidden(tokens, segment_ids, forward=forward)
    hidden = hidden.rearrange((EMBED, BATCH, POSITION))
    head = model.output_head.rearrange((VOCAB, EMBED))
    return hidden.array, head.array, jnp.roll(tokens.array, -1, axis=1)


def _id_count(model: Transformer) -> int | None:
    """The number of ids of a padded vocabulary; None where the vocabulary has no padding."""
    ids = model.config.vocab_size
    return None if ids == model.Vocab.size else ids


def _has_target(tokens: NamedArray) -> NamedArray:
    """1.0 where the sequence has a next token, 0.0 at the last position; [batch, position]."""
    Position = tokens.resolve_axis(POSITION)
    inside = hax.arange(Position) < Position.size - 1
    return inside.astype(jnp.float32).broadcast_to((tokens.resolve_axis(BATCH), Position))
