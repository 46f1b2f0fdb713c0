"""The tile sizes of `models.attention.tile_choice` as the splash kernel's `BlockSizes`."""

from __future__ import annotations

import dataclasses
import functools

from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from models.shape.splash_tiles import choose_tiles

SEQ_MINOR = splash_attention_kernel.QKVLayout.SEQ_MINOR


@functools.cache
def block_sizes(
    position: int,
    head_size: int,
    window: int | None = None,
    sequence_shards: int = 1,
    heads: int = 1,
) -> splash_attention_kernel.BlockSizes:
    """Tile sizes for a sequence length; for the arguments see `choose_tiles`.

    The kernel reads queries, keys and values with positions in the minor axis, as the projections
    write them. Heads of 64 are then not padded; for wider heads the other order saves under 3% of
    the cycles, less than the transposes would cost.
    """
    tiles = choose_tiles(position, head_size, window, sequence_shards, heads)
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), SEQ_MINOR)
    return splash_attention_kernel.BlockSizes(**dataclasses.asdict(tiles), **layouts)
