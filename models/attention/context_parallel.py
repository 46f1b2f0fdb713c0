"""Context parallelism: collectives for an attention kernel on sequences divided over devices.

Three schemes, inside `jax.shard_map` over the mesh axes that divide the positions:

- "heads": an all-to-all exchanges positions for heads (Jacobs et al., 2023, arXiv:2309.14509).
- "zigzag": where the heads are not divisible, each device all-gathers keys and values. It computes
  one chunk of queries from the front of the sequence and one from the back, so that causal
  attention costs every device the same (Dubey et al., 2024, arXiv:2407.21783, section 3.3.2).
- "gathered": all-gathered keys and values, and the queries stay in place. With a window, queries at
  the front and at the back cost the same. Also used where zigzag's chunks do not fit the kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from models.layers.axes import MeshAxes
from models.shape.splash_tiles import LANES, choose_way


def zigzag_order(position: int, shards: int) -> np.ndarray:
    """Positions in the order of the devices that compute them, int32 [position].

    Of 2 * shards chunks device d has chunks d and 2 * shards - 1 - d. A causal chunk c costs
    c + 1/2 chunks of keys, so each device costs 2 * shards.
    """
    chunks = np.arange(position, dtype=np.int32).reshape(2 * shards, -1)
    pairs = ((device, 2 * shards - 1 - device) for device in range(shards))
    return np.concatenate([chunks[chunk] for pair in pairs for chunk in pair])


Attend = Callable[[Array, Array, Array, Array | None, Array | None], Array]
"""Attention of queries, keys, values, and segment ids [batch, position] of queries and of keys."""


def divided(
    mesh_axes: MeshAxes, kv_heads: int, position: int, window: int | None
) -> tuple[Exchange, str]:
    """The devices that share a sequence, and the way in which they do; "alone" where none do."""
    exchange = Exchange(mesh_axes.sequence, mesh_axes.shards(mesh_axes.sequence))
    if exchange.shards == 1:
        return exchange, "alone"
    chunk_fits = position % (2 * exchange.shards * LANES) == 0
    heads = kv_heads // mesh_axes.shards(mesh_axes.heads)
    return exchange, choose_way(heads, chunk_fits, window, exchange.shards)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives between the `shards` devices along `axes`, which share a sequence."""

    axes: tuple[str, ...]
    shards: int

    def attend(
        self,
        attend: Attend,
        way: str,
        axis: int,
        q: Array,
        k: Array,
        v: Array,
        ids: Array | None,
    ) -> Array:
        """Attention of this device's positions to all, in one of the ways of `choose_way`.

        `axis` is that of the positions, also of the result, whose axis 1 are heads or features.
        """

        def gather(x: Array, axis: int) -> Array:
            return jax.lax.all_gather(x, self.axes, axis=axis, tiled=True)

        if way == "alone":
            return attend(q, k, v, ids, ids)
        if way == "heads":  # all heads of some positions become some heads of all positions
            q, k, v = (
                jax.lax.all_to_all(x, self.axes, split_axis=1, concat_axis=axis, tiled=True)
                for x in (q, k, v)
            )
            ids = None if ids is None else gather(ids, 1)
            out = attend(q, k, v, ids, ids)
            return jax.lax.all_to_all(out, self.axes, split_axis=axis, concat_axis=1, tiled=True)
        q_ids = k_ids = ids
        if ids is not None:
            q_ids = self.to_zigzag(ids, 1) if way == "zigzag" else ids
            k_ids = gather(ids, 1)
        k, v = gather(k, axis), gather(v, axis)
        if way == "gathered":
            return attend(q, k, v, q_ids, k_ids)
        return self.from_zigzag(attend(self.to_zigzag(q, axis), k, v, q_ids, k_ids), axis)

    def firsts(self, way: str, queries: int) -> tuple[Array | int, ...]:
        """The positions at which this device's stretches of contiguous queries begin."""
        if way in ("alone", "heads"):
            return (0,)
        device = jax.lax.axis_index(self.axes)
        if way == "gathered":
            return (device * queries,)
        stretch = queries // 2
        return device * stretch, (2 * self.shards - 1 - device) * stretch

    def to_zigzag(self, x: Array, axis: int) -> Array:
        """Exchange this device's contiguous positions along `axis` for those of `zigzag_order`."""
        first, second = jnp.split(x, 2, axis)
        at_even = jax.lax.ppermute(first, self.axes, self._moves(0))
        at_odd = jax.lax.ppermute(second, self.axes, self._moves(1))
        return self._front_to_back(at_even, at_odd, axis)

    def from_zigzag(self, x: Array, axis: int) -> Array:
        """Inverse of `to_zigzag`."""
        first, second = jnp.split(x, 2, axis)
        pair = self._front_to_back(first, second, axis)
        back = (
            jax.lax.ppermute(part, self.axes, [(b, a) for a, b in self._moves(which)])
            for which, part in enumerate(jnp.split(pair, 2, axis))
        )
        return jnp.concatenate(tuple(back), axis)

    def _moves(self, which: int) -> list[tuple[int, int]]:
        """(source, destination) devices of the first (0) or second (1) chunk of every device.

        Device d holds chunks 2d and 2d + 1. Even chunks of the front half go to even devices, those
        of the back half to odd devices: each device receives one even and one odd chunk.
        """
        last = 2 * self.shards - 1
        return [(chunk // 2, min(chunk, last - chunk)) for chunk in range(which, last + 1, 2)]

    def _front_to_back(self, a: Array, b: Array, axis: int) -> Array:
        """`a` before `b` on even devices, `b` before `a` on odd ones."""
        even = jax.lax.axis_index(self.axes) % 2 == 0
        pair = jnp.where(even, a, b), jnp.where(even, b, a)
        return jnp.concatenate(pair, axis)
