"""Telling a loss spike from ordinary noise, on the device.

The last `WINDOW` losses that were applied are kept in the train state. A step is a spike when its
loss is more than `guard` times their median, once at least `LEAST` of them are there. A spike is
not applied, as a step that is not finite is not; https://arxiv.org/abs/2204.02311, section 5.1, is
where skipping the batches of spikes comes from.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

WINDOW = 64
LEAST = 16


def no_losses() -> jax.Array:
    """Before the first step: float32 [WINDOW], NaN where no loss is yet."""
    return jnp.full((WINDOW,), jnp.nan, jnp.float32)


def is_spike(recent: jax.Array, loss: jax.Array, guard: float) -> jax.Array:
    """Whether `loss` is a spike after the losses `recent` float32 [WINDOW]: bool scalar."""
    known = jnp.sum(~jnp.isnan(recent))
    return (known >= LEAST) & (loss > guard * jnp.nanmedian(recent))


def remember(recent: jax.Array, loss: jax.Array) -> jax.Array:
    """`recent` with `loss` instead of its oldest."""
    return jnp.concatenate([recent[1:], loss[None].astype(recent.dtype)])
