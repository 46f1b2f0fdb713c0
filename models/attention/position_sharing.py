"""Which of the ways of `models.attention.context_parallel` divides attention; imports no JAX."""

from __future__ import annotations

from typing import Literal

Way = Literal["heads", "zigzag", "gathered"]


def choose_way(kv_heads: int, chunk_fits: bool, window: int | None, shards: int) -> Way:
    """How to divide attention over `shards` devices.

    Args:
        kv_heads: of one device, before the exchange.
        chunk_fits: whether the kernel can take half of a device's positions as a chunk.
        window: positions that one sees, or None for all.
        shards: devices that share a row.
    """
    if kv_heads % shards == 0:
        return "heads"
    return "zigzag" if chunk_fits and window is None else "gathered"
