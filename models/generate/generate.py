"""Completion of prompts, all at once or streamed a few tokens at a time.

`stream` runs the prompts in one forward pass and then loops on the device with a KV cache, one
token of every row per iteration. The host receives those of several iterations at once. Each row
ends after its EOS or its last token, and its tokens do not depend on the other rows.

Few programs are compiled: the lengths of the prompts and of the cache are rounded up (see
`bucket_length`), and sampling, the EOS and all lengths are traced arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import models.named as hax
from models.attention.backend_choice import choose_backend
from models.generate.kv_cache import KVCache, decode, prefill
from models.generate.sampling_config import Sampling
from models.generate.token_sampling import Rules, choose
from models.jax_numerics import exact_products, fixed_numerics
from models.layers.axes import BATCH, EMBED, POSITION, VOCAB
from models.layers.scan_layers import split_layers
from models.shape.config import TransformerConfig
from models.transformer import Block, Forward, Transformer
from pipeline.errors import InputError

NO_TOKEN = -1
TOKENS_PER_YIELD = 8
"""Default number of tokens per row and yield."""
MAX_TOKENS_PER_CALL = 64
"""Maximum tokens per row of one call of the compiled program."""

Prompts = Sequence[Sequence[int]]


class State(eqx.Module):
    """The state of decoding: everything the next token depends on except the model."""

    cache: KVCache
    token: Array  # int32 [batch], the newest token of each row; not in the cache yet
    position: Array  # int32 [batch], that of `token`
    left: Array  # int32 [batch], tokens that may still follow; 0 for a row that has ended


def generate(
    model: Transformer,
    prompts: Prompts,
    *,
    new_tokens: int,
    sampling: Sampling | None = None,
    eos_id: int | None = None,
) -> list[list[int]]:
    """The tokens that follow each prompt; see `stream`."""
    written: list[list[int]] = [[] for _ in prompts]
    how = {"sampling": sampling, "eos_id": eos_id, "tokens_per_yield": MAX_TOKENS_PER_CALL}
    for parts in stream(model, prompts, new_tokens=new_tokens, **how):
        for row, part in zip(written, parts, strict=True):
            row += part
    return written


def stream(
    model: Transformer,
    prompts: Prompts,
    *,
    new_tokens: int,
    sampling: Sampling | None = None,
    eos_id: int | None = None,
    tokens_per_yield: int = TOKENS_PER_YIELD,
) -> Iterator[list[list[int]]]:
    """The tokens that follow each prompt since the last yield, none for one that has ended.

    Args:
        model: the model, already cast to the compute dtype, on one device.
        sampling: how to choose tokens; default: the likeliest token every time.
        eos_id: the token that ends a row; it is included in the result.
        tokens_per_yield: tokens per row between two yields, at most `MAX_TOKENS_PER_CALL`.

    Raises `InputError` for arguments out of range, at the call, not at the first iteration.
    """
    check(model.config, prompts, new_tokens)
    if not 1 <= tokens_per_yield <= MAX_TOKENS_PER_CALL:
        raise InputError(
            f"generate: expected tokens_per_yield of 1 to {MAX_TOKENS_PER_CALL}, "
            f"found {tokens_per_yield}"
        )
    rules = Rules.of(sampling or Sampling())
    parts = _stream(model, prompts, new_tokens, rules, eos_id, tokens_per_yield)

    def fixed() -> list[list[int]] | None:
        """The next part with `fixed_numerics`, which the caller's code does not run in."""
        with fixed_numerics(), exact_products(model.embedding.dtype):
            return next(parts, None)

    return iter(fixed, None)


def _stream(
    model: Transformer,
    prompts: Prompts,
    new_tokens: int,
    rules: Rules,
    eos_id: int | None,
    tokens_per_yield: int,
) -> Iterator[list[list[int]]]:
    config = model.config
    tokens, lengths = pad_prompts(config, prompts)
    eos = jnp.int32(NO_TOKEN if eos_id is None else eos_id)
    state = _begin(
        model,
        tokens,
        lengths,
        jnp.int32(new_tokens),
        rules,
        eos,
        positions=cache_length(config, prompts, new_tokens),
        backend=backend_for(config, model.embedding.array, tokens.shape[1]),
    )
    first, ended = jax.device_get((state.token, state.left == 0))
    yield [[int(token)] for token in first]
    blocks = None
    if _platform(model.embedding.array) == "cpu":
        model, blocks = eqx.tree_at(lambda m: m.blocks, model, None), _split(model.blocks.stacked)
    while not ended.all():
        made, state = _advance(model, blocks, state, rules, eos, jnp.int32(tokens_per_yield))
        ids, ended = jax.device_get((made, state.left == 0))
        yield [[int(token) for token in row if token != NO_TOKEN] for row in ids]


def check(config: TransformerConfig, prompts: Prompts, new_tokens: int) -> None:
    """Raise `InputError` if the model cannot continue the prompts by `new_tokens`."""
    if not prompts:
        raise InputError("generate: expected at least one prompt, found none; give one")
    for index, ids in enumerate(prompts):
        if not len(ids):
            raise InputError(
                f"generate: prompt {index} is empty; give at least one token, such as the EOS"
            )
        if not 0 <= min(ids) <= max(ids) < config.vocab_size:
            raise InputError(
                f"generate: expected ids in [0, {config.vocab_size}), found {min(ids)} to "
                f"{max(ids)} in prompt {index}; encode it with the model's tokenizer"
            )
    longest = max(len(ids) for ids in prompts)
    if new_tokens < 1:
        raise InputError(f"generate: expected new_tokens of at least 1, found {new_tokens}")
    if config.context is not None and longest + new_tokens > config.context:
        raise InputError(
            f"generate: a prompt of {longest} tokens and {new_tokens} new ones are more than the "
            f"{config.context} learned positions of the model; shorten the prompt or ask for at "
            f"most {max(0, config.context - longest)} tokens"
        )


def bucket_length(length: int, config: TransformerConfig) -> int:
    """`length` rounded up to a power of two from 16, from 512 on to a multiple of 512.

    So few lengths are compiled. Never more than the learned positions.
    """
    rounded = max(16, 1 << (length - 1).bit_length()) if length <= 512 else -(-length // 512) * 512
    return rounded if config.context is None else min(rounded, config.context)


def pad_prompts(config: TransformerConfig, prompts: Prompts) -> tuple[np.ndarray, np.ndarray]:
    """The prompts as int32 [batch, position], padded at the end, and their lengths [batch]."""
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    tokens = np.zeros((len(prompts), bucket_length(int(lengths.max()), config)), np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    return tokens, lengths


def cache_length(config: TransformerConfig, prompts: Prompts, new_tokens: int) -> int:
    """Slots of the cache for the prompts and their new tokens."""
    return bucket_length(max(len(ids) for ids in prompts) + new_tokens, config)


def _platform(array: Array) -> str:
    (device, *_) = array.devices()  # JAX's own set, which a pop would empty
    return device.platform


def backend_for(config: TransformerConfig, array: Array, position: int) -> str:
    """The attention back end for the prompts, on the device and in the dtype of `array`."""
    return choose_backend(
        "auto",
        _platform(array),
        position=position,
        head_size=config.head_size,
        soft_cap=config.attention_soft_cap,
        window=config.window,
        dtype=array.dtype.name,
    ).backend


def begin(
    model: Transformer,
    tokens: Array,
    lengths: Array,
    new_tokens: Array,
    rules: Rules,
    eos: Array,
    *,
    positions: int,
    backend: str,
) -> State:
    """The state after the prefill and the choice of each row's first new token.

    `tokens` and `lengths` are those of `pad_prompts`; the cache has `positions` slots.
    """
    rows = jnp.arange(tokens.shape[0])
    hidden, cache = prefill(
        model, hax.named(tokens, (BATCH, POSITION)), positions=positions, backend=backend
    )
    last = hidden.rearrange((BATCH, POSITION, EMBED)).array[rows, lengths - 1]
    logits = _logits(model, hax.named(last, (BATCH, EMBED)))
    token = choose(logits, rules, rules.keys(len(rows)), lengths)
    left = jnp.where(token == eos, 0, new_tokens - 1)
    return State(cache=cache, token=token, position=lengths, left=left)


def advance(
    model: Transformer,
    blocks: tuple[Block, ...] | None,
    state: State,
    rules: Rules,
    eos: Array,
    new_tokens: Array,
    *,
    most: int = MAX_TOKENS_PER_CALL,
) -> tuple[Array, State]:
    """Up to `new_tokens` more tokens per row, int32 [batch, most] with `NO_TOKEN` behind them.

    `blocks` are those of `decode`: split ones hold the model twice, and save time on a CPU.
    """
    keys = rules.keys(state.token.shape[0])

    def unfinished(carry: tuple[Array, Array, State]) -> Array:
        count, _, state = carry
        return (count < new_tokens) & jnp.any(state.left > 0)

    def one(carry: tuple[Array, Array, State]) -> tuple[Array, Array, State]:
        count, made, state = carry
        hidden, cache = decode(model, blocks, state.token, state.position, state.cache)
        chosen = choose(_logits(model, hidden), rules, keys, state.position + 1)
        running = state.left > 0
        made = made.at[:, count].set(jnp.where(running, chosen, NO_TOKEN))
        state = State(
            cache=cache,
            token=jnp.where(running, chosen, state.token),
            # A row that has ended keeps its position and rewrites the same slot.
            position=jnp.where(running, state.position + 1, state.position),
            left=jnp.where(running & (chosen != eos), state.left - 1, 0),
        )
        return count + 1, made, state

    made = jnp.full((state.token.shape[0], most), NO_TOKEN)
    _, made, state = jax.lax.while_loop(unfinished, one, (jnp.int32(0), made, state))
    return made, state


def _logits(model: Transformer, hidden: hax.NamedArray) -> Array:
    return model.logits_of(hidden).rearrange((BATCH, VOCAB)).array


_begin = jax.jit(begin, static_argnames=("positions", "backend"))
_advance = jax.jit(advance, donate_argnames="state", static_argnames="most")
_split = jax.jit(split_layers)


def next_token_logits(model: Transformer, rows: np.ndarray) -> np.ndarray:
    """Float32 logits [batch, position, vocab] of ids [batch, position].

    Rows are padded to a rounded length, so that few are compiled; the causal mask hides the rest.
    """
    vocab, context = model.config.vocab_size, model.config.context
    if not 0 <= rows.min() <= rows.max() < vocab:
        raise InputError(
            f"tokens: expected ids in [0, {vocab}), found {rows.min()} to {rows.max()}; encode "
            "the text with the model's tokenizer"
        )
    if context is not None and rows.shape[1] > context:
        raise InputError(
            f"tokens: expected at most {context} positions, the number of learned positions, "
            f"found {rows.shape[1]}; shorten the sequences"
        )
    tokens, _ = pad_prompts(model.config, rows.tolist())
    backend = backend_for(model.config, model.embedding.array, tokens.shape[1])
    with exact_products(model.embedding.dtype):
        logits = _logits_of_rows(model, tokens, backend=backend)
    return np.asarray(logits)[:, : rows.shape[1]]


@partial(jax.jit, static_argnames="backend")
def _logits_of_rows(model: Transformer, tokens: Array, *, backend: str) -> Array:
    forward = Forward(backend=backend)
    return model.logits(hax.named(tokens, (BATCH, POSITION)), forward=forward).array
