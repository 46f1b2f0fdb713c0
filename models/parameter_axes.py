"""The named axes of a model's parameters, from its shape alone; imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping

from models.shape.config import TransformerConfig


def parameter_axes(config: TransformerConfig) -> tuple[Mapping[str, int], ...]:
    """Sizes of the named axes of the parameters of `models.transformer`, one entry per shape."""
    embed, heads = {"embed": config.embed}, {"head_size": config.head_size}
    keys = {"kv_heads": config.kv_heads, **heads}
    queries = {"q_per_kv": config.q_per_kv, **keys}
    mlp = {"mlp": config.mlp}
    of_block = [embed, {**embed, **queries}, {**embed, **keys}, {**embed, **mlp}]
    of_block += [heads] if config.qk_norm else []
    of_block += [queries, keys] if config.biases or config.qkv_biases else []
    of_block += [mlp] if config.biases else []
    found = [{"vocab": config.padded_vocab_size, **embed}]
    found += [{"position": config.context, **embed}] if config.context is not None else []
    return (*found, embed, *({"layers": config.layers, **axes} for axes in of_block))
