"""Reductions over the ids of a vocabulary, held by one device or divided over several."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

_NO_PROBABILITY = -1e9  # exp is 0; finite, so that 0 times the soft cap's derivative is 0, not NaN


@dataclasses.dataclass(frozen=True)
class IdParts:
    """How the ids of logits [vocab, batch, position] are divided over devices.

    Attributes:
        axes: mesh axes of the surrounding `shard_map` that divide the ids, in order; empty where
            every device has all ids. Devices along them have different sequences of the batch.
        count: number of ids; None where no logits are padding.
    """

    axes: tuple[str, ...] = ()
    count: int | None = None

    def mask(self, logits: Array) -> Array:
        """`logits` with the padding of the vocabulary masked."""
        if self.count is None:
            return logits
        first = jax.lax.axis_index(self.axes) * logits.shape[0] if self.axes else 0
        ids = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
        return jnp.where(ids < self.count, logits, _NO_PROBABILITY)

    def gather_rows(self, x: Array, axis: int) -> Array:
        """`x` all-gathered along `axis` from the devices that share the ids."""
        return jax.lax.all_gather(x, self.axes, axis=axis, tiled=True) if self.axes else x

    def scatter_rows(self, x: Array, axis: int) -> Array:
        """`x` summed over the devices that share the ids and scattered along `axis`."""
        if not self.axes:
            return x
        return jax.lax.psum_scatter(x, self.axes, scatter_dimension=axis, tiled=True)

    def log_sum_exp(self, logits: Array) -> Array:
        """Log-sum-exp over all ids, [batch, position]."""
        local = jax.nn.logsumexp(logits, axis=0)
        if not self.axes:
            return local
        # log sum_d exp(lse_d) over devices d, shifted by the maximum so that no exp overflows.
        largest = jax.lax.pmax(local, self.axes)
        return largest + jnp.log(jax.lax.psum(jnp.exp(local - largest), self.axes))

    def is_target(self, logits: Array, targets: Array) -> Array:
        """Whether each logit is its position's target, boolean with the shape of `logits`."""
        ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 0)
        if self.axes:
            targets = targets - jax.lax.axis_index(self.axes) * logits.shape[0]
        return ids == targets[None]

    def at_target(self, logits: Array, targets: Array) -> Array:
        """The logit of every position's target, [batch, position]."""
        # Unlike a gather, a masked sum stays local when the compiler shards the ids.
        local = jnp.sum(jnp.where(self.is_target(logits, targets), logits, 0.0), axis=0)
        return jax.lax.psum(local, self.axes) if self.axes else local
