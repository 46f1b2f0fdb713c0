"""Cross-entropy of a linear head for CPUs, in chunks of the vocabulary.

A chunk of positions reads and adds to the whole head's gradient, and its logits against all ids do
not fit a cache. Here a chunk has some ids and all positions: one scan for the log-sum-exp of every
position, a second that makes the logits again, their gradient, and the finished gradient of these
ids' rows of the head. That is a fourth matmul, which costs less than the memory traffic
it saves: on two cores, 2,048 positions, 32,768 ids and an embed of 128 take 0.21 s instead of 0.31.
Where matmuls are fast and memory is too, chunks of positions are better.

Formulas and rounding are those of `models.loss.cross_entropy`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from models.loss.id_parts import mask_padding

CHUNK_BYTES = 8 * 2**20
LEAST_IDS = 256


def vocabulary_chunks(vocab: int, tokens: int) -> int | None:
    """Chunks of ids so that float32 logits of `tokens` positions fit a cache, a divisor of `vocab`.

    None where a chunk would have fewer than `LEAST_IDS` ids: then matmuls are too small.
    """
    needed = -(-vocab * tokens * 4 // CHUNK_BYTES)
    most = vocab // LEAST_IDS
    return next((n for n in range(needed, most + 1) if vocab % n == 0), None)


def sums_and_gradients(
    z_loss: float,
    soft_cap: float | None,
    chunks: int,
    ids: int | None,
    hidden_EBP: Array,
    head_VE: Array,
    targets_BP: Array,
    weights_BP: Array,
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array]]:
    """(objective, nll, z) and the gradients of hidden states and head, see `summed_losses`.

    Args:
        z_loss, soft_cap: see `models.loss.cross_entropy.summed_losses`.
        chunks: divisor of V.
        ids: rows of the head that are no padding.
        hidden_EBP, head_VE, targets_BP, weights_BP: see there; all on this device.
    """
    embed, *rows = hidden_EBP.shape
    hidden = hidden_EBP.reshape(embed, -1)
    targets, weights = targets_BP.reshape(-1), weights_BP.reshape(-1)
    parts = head_VE.reshape(chunks, -1, embed)
    first = jnp.arange(chunks, dtype=jnp.int32) * parts.shape[1]

    def logits_of(chunk: tuple[Array, Array]) -> Array:
        part, first = chunk
        return mask_padding(_capped(_product(part, hidden), soft_cap), first, ids)

    lse = _log_sum_exp((parts, first), logits_of, hidden.shape[1])
    target_rows = head_VE[targets]
    at_target = _capped(
        jnp.einsum("te,et->t", target_rows, hidden, preferred_element_type=jnp.float32), soft_cap
    )
    nll = jnp.sum((lse - at_target) * weights)
    z = z_loss * jnp.sum(jnp.square(lse) * weights)
    scale = weights * (1.0 + 2.0 * z_loss * lse)

    def one_chunk(hidden_bar: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        part, logits = chunk[0], logits_of(chunk)
        gradient = jnp.exp(logits - lse[None]) * scale[None]
        gradient = _through_cap(gradient, logits, soft_cap).astype(hidden.dtype)
        more = jnp.einsum("ve,vt->et", part, gradient, preferred_element_type=jnp.float32)
        of_part = jnp.einsum("vt,et->ve", gradient, hidden, preferred_element_type=jnp.float32)
        return hidden_bar + more, of_part

    zero = jnp.zeros(hidden.shape, jnp.float32)
    hidden_bar, head_bar = jax.lax.scan(one_chunk, zero, (parts, first))
    taken = _through_cap(weights, at_target, soft_cap)
    hidden_bar = hidden_bar - (target_rows.astype(jnp.float32) * taken[:, None]).T
    of_targets = (hidden.astype(jnp.float32) * taken[None]).T
    head_bar = head_bar.reshape(head_VE.shape).at[targets].add(-of_targets)
    gradients = hidden_bar.reshape(embed, *rows).astype(hidden.dtype), head_bar
    return (nll + z, nll, z), gradients


def _log_sum_exp(
    chunks: tuple[Array, Array], logits_of: Callable[[tuple[Array, Array]], Array], tokens: int
) -> Array:
    """float32 [tokens], the maximum kept along so that no exponential overflows."""

    def one_chunk(carry: tuple[Array, Array], chunk: tuple[Array, Array]) -> tuple[Any, None]:
        largest, total = carry
        logits = logits_of(chunk)
        now = jnp.maximum(largest, jnp.max(logits, axis=0))
        total = total * jnp.exp(largest - now) + jnp.sum(jnp.exp(logits - now[None]), axis=0)
        return (now, total), None

    start = jnp.full(tokens, -jnp.inf, jnp.float32), jnp.zeros(tokens, jnp.float32)
    (largest, total), _ = jax.lax.scan(one_chunk, start, chunks)
    return largest + jnp.log(total)


def _product(part: Array, hidden: Array) -> Array:
    return jnp.einsum("ve,et->vt", part, hidden, preferred_element_type=jnp.float32)


def _capped(logits: Array, soft_cap: float | None) -> Array:
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _through_cap(gradient: Array, logits: Array, soft_cap: float | None) -> Array:
    return gradient if soft_cap is None else gradient * (1.0 - jnp.square(logits / soft_cap))
