"""The choice between the schemes of `models.attention.context_parallel`; imports no JAX."""

from __future__ import annotations

from typing import Literal

Way = Literal["heads", "zigzag", "gathered"]


def choose_way(kv_heads: int, chunk_fits: bool, window: int | None, shards: int) -> Way:
    """The scheme that divides the attention of a sequence over `shards` devices.

    Args:
        kv_heads: key/value heads of one device before the all-to-all.
        chunk_fits: whether half of a device's positions is a chunk that the kernel can tile.
        window: positions each position attends to, or None for all.
        shards: devices that share a sequence.
    """
    if kv_heads % shards == 0:
        return "heads"
    return "zigzag" if chunk_fits and window is None else "gathered"
