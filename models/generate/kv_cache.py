"""KV cache: keys and values of the past positions, so that a new token costs one token's work.

`prefill` runs whole prompts at once with the model's own attention and saves their keys and values;
`decode` runs one position of every row against the cache. The logits are those of
`Transformer.logits` up to rounding, for every shape of model.

Rows of different lengths are padded at the end, and a token's keys and values are in the slot of
its position. Later tokens overwrite the slots behind a row's last token before any position attends
to them, so the causal mask is sufficient. Layers with a sliding window also keep all positions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import Array

import models.named as hax
from models.attention.dispatch import attend
from models.attention.reference import MASKED, Mask
from models.layers.axes import (
    BATCH,
    EMBED,
    HEAD_SIZE,
    KEY_POSITION,
    KV_HEADS,
    LAYERS,
    POSITION,
    Q_PER_KV,
    TOKENS_FIRST,
)
from models.layers.scan_layers import collect_layers, split_layers
from models.layers.value_embedding import NO_VALUES, Values
from models.named import Axis, NamedArray
from models.shape.config import Kind, TransformerConfig
from models.transformer import Block, Transformer

SLOTS = (BATCH, KV_HEADS, POSITION, HEAD_SIZE)
"""Axes of one layer's keys and of its values, in the order that attention's matmuls read."""


class KVCache(eqx.Module):
    """Keys, after norm and rotation, and values: [batch, kv_heads, position, head_size] per layer.

    Layers do not share an array, because a CPU copies a slice of one before it multiplies by it.
    """

    keys: tuple[NamedArray, ...]
    values: tuple[NamedArray, ...]


def prefill(
    model: Transformer, tokens: NamedArray, *, positions: int, backend: str = "reference"
) -> tuple[NamedArray, KVCache]:
    """Final hidden states of the prompts, and the cache of their keys and values.

    `tokens` are int32 [batch, position], rows padded at the end with any id; hidden states [batch,
    position, embed] are valid up to the last token of each row. The cache has `positions` slots.
    """
    config, (start, angles) = model.config, model.embed(tokens, TOKENS_FIRST)

    def one_layer(
        layer: tuple[Block, Values], x: NamedArray, kind: Kind
    ) -> tuple[NamedArray, tuple[Array, Array]]:
        block, of_tokens = layer
        attention = partial(attend, mask=Mask(kind[0], config.attention_soft_cap), backend=backend)
        x, (k, v) = block(x, angles, attention, start, of_tokens)
        return x, (k.rearrange(SLOTS).array, v.rearrange(SLOTS).array)

    def padded(made: Array) -> tuple[NamedArray, ...]:
        """[layers, batch, kv_heads, position, head_size] as one zero-padded array per layer."""
        slots = jnp.pad(made, ((0, 0), (0, 0), (0, 0), (0, positions - made.shape[3]), (0, 0)))
        return tuple(hax.named(slots[i], SLOTS) for i in range(config.layers))

    stacked = model.blocks.stacked, model.values(tokens, TOKENS_FIRST)
    owners = config.value_layers
    x, (keys, values) = collect_layers(stacked, start, one_layer, config.kinds, owners=owners)
    cache = KVCache(padded(keys), padded(values))
    return model.final_norm(x), cache


def decode(
    model: Transformer,
    blocks: tuple[Block, ...] | None,
    tokens: Array,
    positions: Array,
    cache: KVCache,
) -> tuple[NamedArray, KVCache]:
    """Final hidden states of one more token per row, and the cache with that token added.

    `tokens` and their `positions` are int32 [batch]; the slots before these are filled. `blocks`
    are those of `split_layers`, and the model's own are not read; without, these are scanned.
    """
    Batch = Axis(BATCH, tokens.shape[0])
    here = hax.named(positions, Batch)
    named, config = hax.named(tokens, Batch), model.config
    start, angles = model.embed(named, (BATCH, EMBED), positions=here)

    def one_layer(
        layer: tuple[Any, ...], x: NamedArray, kind: Kind
    ) -> tuple[NamedArray, tuple[NamedArray, NamedArray]]:
        (block, of_token), past_keys, past_values = layer
        attention = partial(
            attend_to_past,
            past_keys=past_keys,
            past_values=past_values,
            positions=positions,
            window=kind[0],
            soft_cap=config.attention_soft_cap,
        )
        x, (k, v) = block(x, angles, attention, start, of_token)
        return x, (_write(past_keys, k, positions), _write(past_values, v, positions))

    x, of_tokens = start, model.values(named, (BATCH, EMBED))
    if blocks is None:
        stacked = model.blocks.stacked, of_tokens
        x, (keys, values) = _scanned(stacked, cache, x, one_layer, config)
    else:
        own = iter(split_layers(of_tokens) if any(config.value_layers) else ())
        of_layers = [next(own) if owner else NO_VALUES for owner in config.value_layers]
        made = []
        both = zip(blocks, of_layers, strict=True)
        for *layer, kind in zip(both, cache.keys, cache.values, config.kinds, strict=True):
            x, written = one_layer(tuple(layer), x, kind)
            made.append(written)
        keys, values = zip(*made, strict=True)
    return model.final_norm(x), KVCache(tuple(keys), tuple(values))


def _scanned(
    stacked: tuple[Block, Values],
    cache: KVCache,
    x: NamedArray,
    one_layer: Any,
    config: TransformerConfig,
) -> tuple[NamedArray, tuple[list[NamedArray], ...]]:
    """`x` after all layers, whose parameters stay stacked, and each layer's keys and values."""
    slots = cache.keys[0].axes
    past = [
        hax.named(jnp.stack([layer.array for layer in each]), (Axis(LAYERS, len(each)), *slots))
        for each in (cache.keys, cache.values)
    ]

    def arrays(layer: Any, x: NamedArray, kind: Kind) -> tuple[NamedArray, Any]:
        x, written = one_layer(layer, x, kind)
        return x, tuple(each.rearrange(slots).array for each in written)

    x, made = collect_layers((stacked, *past), x, arrays, config.kinds, owners=config.value_layers)
    return x, tuple([hax.named(each[i], slots) for i in range(config.layers)] for each in made)


def attend_to_past(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    *,
    past_keys: NamedArray,
    past_values: NamedArray,
    positions: Array,
    window: int | None,
    soft_cap: float | None,
) -> NamedArray:
    """Attention of one position per row to itself and to the cached positions before it.

    `q` [batch, kv_heads, q_per_kv, head_size] is scaled, `k` and `v` [batch, kv_heads, head_size]
    are the position's own; `positions` are int32 [batch]. The output has axes and dtype of `q`.
    """
    past_keys, past_values = (x.rename({POSITION: KEY_POSITION}) for x in (past_keys, past_values))
    heads = (BATCH, KV_HEADS, Q_PER_KV)
    q = q.rearrange((*heads, HEAD_SIZE))

    def scores_of(keys: NamedArray, axes: tuple[str, ...]) -> NamedArray:
        scores = hax.dot(q, keys, axis=HEAD_SIZE, out_axes=axes, preferred_element_type=jnp.float32)
        return scores if soft_cap is None else soft_cap * hax.tanh(scores / soft_cap)

    own = scores_of(k, heads)
    scores = scores_of(past_keys, (*heads, KEY_POSITION))
    Slots = past_keys.resolve_axis(KEY_POSITION)
    slots = hax.arange(Slots)
    here = hax.named(positions, q.resolve_axis(BATCH))
    here = here.broadcast_to((*here.axes, Slots))
    past = here > slots
    past = past if window is None else past & (here - slots < window)
    scores = hax.where(past, scores, MASKED)
    largest = hax.maximum(hax.max(scores, axis=KEY_POSITION), own)
    weights, own = hax.exp(scores - largest), hax.exp(own - largest)
    # As in prefill, weights are rounded to the values' dtype for the matmul, not for the sum.
    rounded = weights.astype(v.dtype)
    out = hax.dot(rounded, past_values, axis=KEY_POSITION, preferred_element_type=jnp.float32)
    own_rounded = own.astype(v.dtype).astype(jnp.float32).broadcast_to(out.axes)
    out = out + own_rounded * v.astype(jnp.float32)
    out = out / (hax.sum(weights, axis=KEY_POSITION) + own)
    return out.rearrange(q.axes).astype(q.dtype)


def _write(slots: NamedArray, made: NamedArray, positions: Array) -> NamedArray:
    """One layer's `slots` with `made` [batch, kv_heads, head_size] at each row's position."""
    new = made.rearrange((BATCH, KV_HEADS, HEAD_SIZE)).array
    array = slots.array.at[jnp.arange(new.shape[0]), :, positions].set(new, unique_indices=True)
    return hax.named(array, slots.axes)
