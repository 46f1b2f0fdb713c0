"""Reductions over the ids of a vocabulary that one device has, or several have a part of each."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

_NO_PROBABILITY = -1e9  # finite: its exponential is 0, and so is 0 times the cap's derivative


def mask_padding(logits: Array, first: Array | int, count: int | None) -> Array:
    """Logits [vocab, ...] from id `first` on, the ones from id `count` on without probability."""
    if count is None:
        return logits
    here = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0)
    return jnp.where(here < count, logits, _NO_PROBABILITY)


@dataclasses.dataclass(frozen=True)
class IdParts:
    """Where the ids of logits [vocab, batch, position] lie.

    Attributes:
        axes: mesh axes of a surrounding `shard_map` that divide the ids, in order; none where every
            device has them all. Devices along them have different rows of the batch.
        count: how many ids there are; None where no logits are padding.
    """

    axes: tuple[str, ...] = ()
    count: int | None = None

    def mask(self, logits: Array) -> Array:
        """`logits` with no probability where they are padding."""
        part = jax.lax.axis_index(self.axes) * logits.shape[0] if self.axes else 0
        return mask_padding(logits, part, self.count)

    def gather_rows(self, x: Array, axis: int) -> Array:
        """The rows of all devices that share the ids, along `axis`."""
        return jax.lax.all_gather(x, self.axes, axis=axis, tiled=True) if self.axes else x

    def scatter_rows(self, x: Array, axis: int) -> Array:
        """The sum over the devices that share the ids, of this device's rows along `axis`."""
        if not self.axes:
            return x
        return jax.lax.psum_scatter(x, self.axes, scatter_dimension=axis, tiled=True)

    def log_sum_exp(self, logits: Array) -> Array:
        """Over all ids, [batch, position]."""
        here = jax.nn.logsumexp(logits, axis=0)
        if not self.axes:
            return here
        largest = jax.lax.pmax(here, self.axes)
        return largest + jnp.log(jax.lax.psum(jnp.exp(here - largest), self.axes))

    def is_target(self, logits: Array, targets: Array) -> Array:
        """Whether an element of `logits` belongs to its position's target, boolean."""
        ids = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 0)
        if self.axes:
            targets = targets - jax.lax.axis_index(self.axes) * logits.shape[0]
        return ids == targets[None]

    def at_target(self, logits: Array, targets: Array) -> Array:
        """The logit of every position's target, [batch, position]."""
        # A masked sum instead of a gather stays local when the compiler divides the ids.
        here = jnp.sum(jnp.where(self.is_target(logits, targets), logits, 0.0), axis=0)
        return jax.lax.psum(here, self.axes) if self.axes else here
