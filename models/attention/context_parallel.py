"""How a kernel gets what it needs of rows whose positions are divided over devices.

Three ways, inside `jax.shard_map` over the mesh axes that divide the positions:

- "heads": the devices exchange positions for heads (all-to-all; Jacobs et al., 2023,
  arXiv:2309.14509), each computes all positions of its share of the heads. Every device has the
  same work, and none has all keys and values.
- "zigzag": where the heads do not divide, each device gathers all keys and values. It computes one
  chunk of queries from the front of the row and one from its back, so that causal attention costs
  every device the same (two chunks a device; Dubey et al., 2024, arXiv:2407.21783, section 3.3.2).
- "gathered": the same with the queries where they are: with a window each costs the same there.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


def zigzag_order(position: int, shards: int) -> np.ndarray:
    """Positions in the order in which the devices compute them, int32 [position]."""
    chunks = np.arange(position, dtype=np.int32).reshape(2 * shards, -1)
    pairs = ((device, 2 * shards - 1 - device) for device in range(shards))
    return np.concatenate([chunks[chunk] for pair in pairs for chunk in pair])


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Moves of arrays between the devices that share a row.

    Attributes:
        axes: mesh axes that divide its positions.
        shards: devices along them.
    """

    axes: tuple[str, ...]
    shards: int

    def gather(self, x: Array, axis: int) -> Array:
        """All positions, along `axis`."""
        return jax.lax.all_gather(x, self.axes, axis=axis, tiled=True)

    def to_heads(self, x_BHPD: Array) -> Array:
        """[batch, heads, part of position, head_size] to [batch, part of heads, position, ...]."""
        return jax.lax.all_to_all(x_BHPD, self.axes, split_axis=1, concat_axis=2, tiled=True)

    def to_positions(self, x_BFP: Array) -> Array:
        """[batch, part of features, position] to [batch, features, part of position]."""
        return jax.lax.all_to_all(x_BFP, self.axes, split_axis=2, concat_axis=1, tiled=True)

    def to_zigzag(self, x: Array, axis: int) -> Array:
        """A device's positions, along `axis`, to those of `zigzag_order`."""
        first, second = jnp.split(x, 2, axis)
        at_even = jax.lax.ppermute(first, self.axes, self._moves(0))
        at_odd = jax.lax.ppermute(second, self.axes, self._moves(1))
        return self._in_turn(at_even, at_odd, axis)

    def from_zigzag(self, x: Array, axis: int) -> Array:
        """Inverse of `to_zigzag`."""
        first, second = jnp.split(x, 2, axis)
        pair = self._in_turn(first, second, axis)
        back = (
            jax.lax.ppermute(part, self.axes, [(b, a) for a, b in self._moves(which)])
            for which, part in enumerate(jnp.split(pair, 2, axis))
        )
        return jnp.concatenate(tuple(back), axis)

    def _moves(self, which: int) -> list[tuple[int, int]]:
        """(from, to) of the devices' first (0) or second (1) chunks.

        First chunks have even numbers: those of the front of the row go to even devices, those of
        its back to odd ones; so one permutation moves them all, and another all second chunks.
        """
        chunks = range(which, 2 * self.shards, 2)
        return [
            (chunk // 2, chunk if chunk < self.shards else 2 * self.shards - 1 - chunk)
            for chunk in chunks
        ]

    def _in_turn(self, a: Array, b: Array, axis: int) -> Array:
        """`a` before `b` on even devices, after it on odd ones."""
        even = jax.lax.axis_index(self.axes) % 2 == 0
        pair = jnp.where(even, a, b), jnp.where(even, b, a)
        return jnp.concatenate(pair, axis)
