"""Completion of a prompt, one token at a time, as one compiled program.

The row is padded to a fixed window and the program loops until the completion is done, so its
length, the prompt's length, the temperature and the end token do not compile anything again; only
another window, another `top_k` or another model shape does. Each step runs the whole window (there
is no key/value cache), which is right for samples during training and wrong for serving.
"""

from __future__ import annotations

from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from jax import Array

from models.axes import BATCH, POSITION
from models.transformer import Transformer
from pipeline.errors import InputError

NO_TOKEN = -1


def generate(
    model: Transformer,
    prompt_ids: Sequence[int],
    *,
    new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    key: Array | None = None,
    eos_id: int | None = None,
    window: int,
) -> list[int]:
    """The tokens that follow the prompt: at most `new_tokens`, `eos_id` included if reached.

    Args:
        model: the model, already cast to the compute dtype.
        prompt_ids: at least one id.
        new_tokens: how many to add at most.
        temperature: divides the logits; 0 takes the most likely token every time.
        top_k: sample among the k most likely only.
        key: random key, needed above temperature 0.
        eos_id: stop after this id.
        window: length of the padded row; prompt and completion must fit into it.

    Raises:
        InputError: an argument is out of its range.
    """
    _check(model, prompt_ids, new_tokens, temperature, top_k, key, window)
    row = jnp.zeros(window, jnp.int32).at[: len(prompt_ids)].set(jnp.array(prompt_ids, jnp.int32))
    start, stop = len(prompt_ids), len(prompt_ids) + new_tokens
    row, end = _complete(
        model,
        row,
        jnp.int32(start),
        jnp.int32(stop),
        jnp.float32(temperature),
        jax.random.key(0) if key is None else key,
        jnp.int32(NO_TOKEN if eos_id is None else eos_id),
        top_k,
    )
    return [int(token) for token in row[start : int(end)]]


@eqx.filter_jit
def _complete(
    model: Transformer,
    row: Array,
    start: Array,
    stop: Array,
    temperature: Array,
    key: Array,
    eos_id: Array,
    top_k: int | None,
) -> tuple[Array, Array]:
    """The filled row [window] and the position after its last token."""

    def unfinished(state: tuple[Array, Array]) -> Array:
        row, length = state
        ended = (length > start) & (row[length - 1] == eos_id)
        return (length < stop) & ~ended

    def add_one(state: tuple[Array, Array]) -> tuple[Array, Array]:
        row, length = state
        hidden = model.hidden(hax.named(row[None], (BATCH, POSITION)), remat="none")
        logits = model.logits_of(hidden[BATCH, 0, POSITION, length - 1]).array
        token = _choose(logits, temperature, jax.random.fold_in(key, length), top_k)
        return row.at[length].set(token), length + 1

    return jax.lax.while_loop(unfinished, add_one, (row, start))


def _choose(logits: Array, temperature: Array, key: Array, top_k: int | None) -> Array:
    """One id, int32, from float32 logits [vocab]."""
    best = jnp.argmax(logits).astype(jnp.int32)
    if top_k is not None:
        smallest = jax.lax.top_k(logits, top_k)[0][-1]
        logits = jnp.where(logits >= smallest, logits, -jnp.inf)
    # Division by zero would be discarded by the selection below, but would trip a NaN check.
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    sampled = jax.random.categorical(key, scaled).astype(jnp.int32)
    return jnp.where(temperature > 0, sampled, best)


def _check(
    model: Transformer,
    prompt_ids: Sequence[int],
    new_tokens: int,
    temperature: float,
    top_k: int | None,
    key: Array | None,
    window: int,
) -> None:
    vocab = model.config.vocab_size
    if not prompt_ids:
        raise InputError("generate: the prompt is empty; give at least one token, such as the EOS")
    if not all(0 <= token < vocab for token in prompt_ids):
        raise InputError(
            f"generate: expected prompt ids in [0, {vocab}), found {min(prompt_ids)} to "
            f"{max(prompt_ids)}; encode the prompt with the model's tokenizer"
        )
    if new_tokens < 1 or len(prompt_ids) + new_tokens > window:
        raise InputError(
            f"generate: expected new_tokens in [1, {window - len(prompt_ids)}] (window {window} "
            f"less {len(prompt_ids)} of the prompt), found {new_tokens}; widen the window"
        )
    if not 0 <= temperature < float("inf"):
        raise InputError(f"generate: expected a temperature of 0 or above, found {temperature}")
    if temperature > 0 and key is None:
        raise InputError(f"generate: temperature {temperature} draws at random; give a key")
    if top_k is not None and not 1 <= top_k <= vocab:
        raise InputError(f"generate: expected top_k in [1, {vocab}], found {top_k}")
