"""The choice of `models.attention.tile_choice` as the splash kernel takes it."""

from __future__ import annotations

import dataclasses
import functools

from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from models.attention.tile_choice import choose_tiles

SEQ_MINOR = splash_attention_kernel.QKVLayout.SEQ_MINOR


@functools.cache
def block_sizes(
    position: int,
    head_size: int,
    window: int | None = None,
    sequence_shards: int = 1,
    heads: int = 1,
) -> splash_attention_kernel.BlockSizes:
    """Tile sizes for a row length, see `choose_tiles`.

    Queries, keys and values are read with positions last, as the projections make them; heads of 64
    are not padded so, and for wider ones the other order saves under 3% of the cycles, less than
    turning the arrays costs.
    """
    tiles = choose_tiles(position, head_size, window, sequence_shards, heads)
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), SEQ_MINOR)
    return splash_attention_kernel.BlockSizes(**dataclasses.asdict(tiles), **layouts)
