"""Completion of prompts, all at once and a few tokens at a time.

`stream` runs the prompts in one pass and then loops on the device, one token of every row a turn,
by a cache of keys and values (see `models.generate.kv_cache`); the host is handed the new tokens of
a few turns at once. `generate` collects them. A row ends by itself, after its end token or its last
token, and what it says does not depend on the other rows.

Programs are few: the prompts' length and the cache's are rounded up (see `bucket_length`), and the
temperature, `top_k`, `top_p`, the seed, the end token and all lengths are data. Another number of
rows, another bucket or another shape of model compiles anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.attention.dispatch import choose_backend
from models.axes import BATCH, EMBED, POSITION, VOCAB
from models.config import TransformerConfig
from models.generate.kv_cache import KVCache, decode, prefill
from models.generate.sampling_config import Sampling
from models.generate.token_sampling import Rules, choose
from models.scan_layers import split_layers
from models.transformer import Block, Transformer
from pipeline.errors import InputError

NO_TOKEN = -1
TOKENS_PER_YIELD = 8
"""Tokens of a row that the host receives at once, by default."""
MAX_TOKENS_PER_CALL = 64
"""The most that one call of the compiled program can make."""

Prompts = Sequence[Sequence[int]]


class State(eqx.Module):
    """Where the rows are: everything the next token depends on but the model.

    Attributes:
        cache: keys and values of all positions before `position`.
        token: int32 [batch], the newest; not in the cache yet.
        position: int32 [batch], where it stands.
        left: int32 [batch], tokens that may still follow; 0 for a row that has ended.
    """

    cache: KVCache
    token: Array
    position: Array
    left: Array


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
    for parts in stream(
        model,
        prompts,
        new_tokens=new_tokens,
        sampling=sampling,
        eos_id=eos_id,
        tokens_per_yield=MAX_TOKENS_PER_CALL,
    ):
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
    """The tokens that follow each prompt, as they come.

    Args:
        model: the model, already cast to the compute dtype, on one device.
        prompts: at least one id each.
        new_tokens: how many to add to each at most.
        sampling: how to choose; by default the likeliest token every time.
        eos_id: ends a row, and is part of what follows.
        tokens_per_yield: tokens of a row between two yields, at most `MAX_TOKENS_PER_CALL`.

    Yields:
        The new ids of every prompt since the last time, none for one that has ended.

    Raises:
        InputError: an argument is out of its range; at the call, not at the first token.
    """
    check(model.config, prompts, new_tokens)
    if not 1 <= tokens_per_yield <= MAX_TOKENS_PER_CALL:
        raise InputError(
            f"generate: expected tokens_per_yield of 1 to {MAX_TOKENS_PER_CALL}, "
            f"found {tokens_per_yield}"
        )
    rules = Rules.of(sampling or Sampling())
    return _stream(model, prompts, new_tokens, rules, eos_id, tokens_per_yield)


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
    outer, blocks = eqx.tree_at(lambda m: m.blocks, model, None), _split(model.blocks.stacked)
    while not ended.all():
        made, state = _advance(outer, blocks, state, rules, eos, jnp.int32(tokens_per_yield))
        ids, ended = jax.device_get((made, state.left == 0))
        yield [[int(token) for token in row if token != NO_TOKEN] for row in ids]


def check(config: TransformerConfig, prompts: Prompts, new_tokens: int) -> None:
    """Refuse prompts that the model cannot continue by `new_tokens`.

    Raises:
        InputError: saying which prompt, or which argument.
    """
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
    """`length` rounded up, so that few lengths are compiled for: to a power of two from 16 on,
    from 512 on to a multiple of 512, and never to more than the learned positions."""
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
    """Slots of the cache for these prompts and what will follow them."""
    return bucket_length(max(len(ids) for ids in prompts) + new_tokens, config)


def backend_for(config: TransformerConfig, array: Array, position: int) -> str:
    """The attention back end of the prompts, for the device and the dtype of `array`."""
    (device, *_) = array.devices()
    return choose_backend(
        "auto",
        device.platform,
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
    """The state of rows whose first new token has been chosen; see `State` and `pad_prompts`.

    Args:
        model: in the compute dtype.
        tokens: int32 [batch, position], padded at the end.
        lengths: int32 [batch], of the prompts.
        new_tokens: int32, most of a row.
        rules: how to choose.
        eos: int32, the id that ends a row, or `NO_TOKEN`.
        positions: slots of the cache.
        backend: attention's.
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
    blocks: tuple[Block, ...],
    state: State,
    rules: Rules,
    eos: Array,
    turns: Array,
    *,
    most: int = MAX_TOKENS_PER_CALL,
) -> tuple[Array, State]:
    """`turns` more tokens, fewer when all rows end; what they are, and the state after them.

    Returns:
        int32 [batch, most]: the tokens in order, `NO_TOKEN` where a row had ended. The state.
    """
    keys = rules.keys(state.token.shape[0])

    def unfinished(carry: tuple[Array, Array, State]) -> Array:
        count, _, state = carry
        return (count < turns) & jnp.any(state.left > 0)

    def one(carry: tuple[Array, Array, State]) -> tuple[Array, Array, State]:
        count, made, state = carry
        hidden, cache = decode(model, blocks, state.token, state.position, state.cache)
        chosen = choose(_logits(model, hidden), rules, keys, state.position + 1)
        running = state.left > 0
        made = made.at[:, count].set(jnp.where(running, chosen, NO_TOKEN))
        state = State(
            cache=cache,
            token=jnp.where(running, chosen, state.token),
            # A row that has ended stays where it is and writes the same slot again.
            position=jnp.where(running, state.position + 1, state.position),
            left=jnp.where(running & (chosen != eos), state.left - 1, 0),
        )
        return count + 1, made, state

    made = jnp.full((state.token.shape[0], most), NO_TOKEN)
    _, made, state = jax.lax.while_loop(unfinished, one, (jnp.int32(0), made, state))
    return made, state


def _logits(model: Transformer, hidden: hax.NamedArray) -> Array:
    """float32 [batch, vocab] of hidden states [batch, embed]."""
    return model.logits_of(hidden).rearrange((BATCH, VOCAB)).array


_begin = jax.jit(begin, static_argnames=("positions", "backend"))
_advance = jax.jit(advance, donate_argnames="state", static_argnames="most")


_split = jax.jit(split_layers)
