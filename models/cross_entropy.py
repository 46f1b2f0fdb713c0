"""Cross-entropy of a linear head, in chunks of positions, with its own backward pass.

Full logits are the largest array of a small language model: 16,384 tokens x 32,768 ids x 4 bytes
are 2 GiB, and their gradient as much again. With more than one chunk a `lax.scan` makes the logits
of one chunk at a time, keeps only their log-sum-exp, and the backward pass makes them again
(one more product with the head). With one chunk the logits are kept, which is faster.

Per token, with logits l = cap(h W^T), z = log sum_v exp(l_v) and target t:

    nll = z - l_t
    d nll / d l_v = softmax(l)_v - [v = t]
    d z   / d l_v = softmax(l)_v

so any loss of (nll, z), masked or with a z-loss, gets its gradient from two cotangents per token.
Logits, z and every reduction are float32; the gradient of the logits is rounded to the hidden
states' dtype before its two matrix products, which accumulate in float32.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.errors import InputError

LOGIT_BUDGET_BYTES = 512 * 2**20


def chunk_count(
    batch: int, position: int, vocab: int, *, shards: int = 1, budget: int = LOGIT_BUDGET_BYTES
) -> int:
    """Chunks of positions so that one chunk's float32 logits fit `budget` bytes on a device.

    The smallest divisor of `position` that is enough, or `position` where none is.

    Args:
        batch: rows of the whole batch.
        position: tokens per row.
        vocab: ids.
        shards: devices among which the batch is divided evenly.
        budget: bytes per device.
    """
    needed = math.ceil(batch * position * vocab * 4 / shards / budget)
    divisors = (chunks for chunks in range(1, position + 1) if position % chunks == 0)
    return next((chunks for chunks in divisors if chunks >= needed), position)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def token_losses(
    hidden_BPE: Array, head_VE: Array, targets_BP: Array, soft_cap: float | None, chunks: int
) -> tuple[Array, Array]:
    """Negative log-likelihood and log-sum-exp of every token, both float32 [B, P].

    Args:
        hidden_BPE: hidden states, any float dtype.
        head_VE: output head in the same dtype.
        targets_BP: int32 ids in [0, V).
        soft_cap: c in c * tanh(logits / c), or None.
        chunks: divisor of P; 1 keeps the logits for the backward pass.

    Raises:
        InputError: `chunks` does not divide P.
    """
    losses, _ = _forward(hidden_BPE, head_VE, targets_BP, soft_cap, chunks)
    return losses


def _logits(hidden: Array, head: Array, soft_cap: float | None) -> Array:
    logits = jnp.einsum("bpe,ve->bpv", hidden, head, preferred_element_type=jnp.float32)
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _losses(logits: Array, targets: Array) -> tuple[Array, Array]:
    lse = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum instead of a gather stays local when the vocabulary is sharded.
    at_target = jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)
    return lse - at_target, lse


def _is_target(logits: Array, targets: Array) -> Array:
    ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    return ids == targets[..., None]


def _logit_gradient(
    logits: Array,
    targets: Array,
    lse: Array,
    nll_bar: Array,
    lse_bar: Array,
    soft_cap: float | None,
) -> Array:
    """Gradient with respect to the logits before the cap, float32 [B, P, V]."""
    softmax = jnp.exp(logits - lse[..., None])
    gradient = softmax * (nll_bar + lse_bar)[..., None]
    gradient = gradient - jnp.where(_is_target(logits, targets), nll_bar[..., None], 0.0)
    if soft_cap is not None:
        gradient = gradient * (1.0 - jnp.square(logits / soft_cap))
    return gradient


def _split(x: Array, chunks: int) -> Array:
    """[B, P, ...] to [chunks, B, P / chunks, ...]; the batch stays whole, so it stays sharded."""
    batch, position, *rest = x.shape
    if position % chunks:
        raise InputError(
            f"chunks: expected a divisor of the {position} positions, found {chunks}; "
            'give another number or "auto"'
        )
    return jnp.moveaxis(x.reshape(batch, chunks, position // chunks, *rest), 1, 0)


def _join(x: Array) -> Array:
    """Inverse of `_split`."""
    chunks, batch, position, *rest = x.shape
    return jnp.moveaxis(x, 0, 1).reshape(batch, chunks * position, *rest)


def _forward(
    hidden: Array, head: Array, targets: Array, soft_cap: float | None, chunks: int
) -> tuple[tuple[Array, Array], tuple[Array | None, ...]]:
    if chunks == 1:
        logits = _logits(hidden, head, soft_cap)
        nll, lse = _losses(logits, targets)
        return (nll, lse), (hidden, head, targets, lse, logits)

    def one_chunk(_: None, chunk: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        hidden, targets = chunk
        return None, _losses(_logits(hidden, head, soft_cap), targets)

    split = (_split(hidden, chunks), _split(targets, chunks))
    _, (nll, lse) = jax.lax.scan(one_chunk, None, split)
    nll, lse = _join(nll), _join(lse)
    return (nll, lse), (hidden, head, targets, lse, None)


def _backward(
    soft_cap: float | None,
    chunks: int,
    residuals: tuple[Array, Array, Array, Array, Array | None],
    cotangents: tuple[Array, Array],
) -> tuple[Array, Array, None]:
    hidden, head, targets, lse, logits = residuals
    if logits is not None:
        gradient = _logit_gradient(logits, targets, lse, *cotangents, soft_cap)
        hidden_bar, head_bar = _products(gradient, hidden, head)
        return hidden_bar, head_bar.astype(head.dtype), None

    def one_chunk(head_bar: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        hidden, targets, lse, nll_bar, lse_bar = chunk
        logits = _logits(hidden, head, soft_cap)
        gradient = _logit_gradient(logits, targets, lse, nll_bar, lse_bar, soft_cap)
        hidden_bar, more = _products(gradient, hidden, head)
        return head_bar + more, hidden_bar

    split = tuple(_split(x, chunks) for x in (hidden, targets, lse, *cotangents))
    head_bar, hidden_bar = jax.lax.scan(one_chunk, jnp.zeros(head.shape, jnp.float32), split)
    return _join(hidden_bar), head_bar.astype(head.dtype), None


def _products(gradient: Array, hidden: Array, head: Array) -> tuple[Array, Array]:
    """Gradients of the hidden states (their dtype) and of the head (float32)."""
    narrow = gradient.astype(hidden.dtype)
    hidden_bar = jnp.einsum("bpv,ve->bpe", narrow, head)
    head_bar = jnp.einsum("bpv,bpe->ve", narrow, hidden, preferred_element_type=jnp.float32)
    return hidden_bar, head_bar


token_losses.defvjp(_forward, _backward)
