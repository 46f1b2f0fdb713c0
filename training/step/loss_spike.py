"""Detects loss spikes on the device.

The train state holds the losses of the last `WINDOW` applied steps. A step is a spike when its loss
is more than `guard` times their median, and at least `LEAST` losses are known. A spike is not
applied, like a step that is not finite; https://arxiv.org/abs/2204.02311, section 5.1, introduced
skipping the batches of spikes. The median is robust: one large loss in the window hardly moves it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

WINDOW = 64
LEAST = 16


def no_losses() -> jax.Array:
    """The window before the first step: float32 [WINDOW], NaN where no loss is known yet."""
    return jnp.full((WINDOW,), jnp.nan, jnp.float32)


def is_spike(recent: jax.Array, loss: jax.Array, guard: float) -> jax.Array:
    """Whether `loss` is a spike given the window `recent`, float32 [WINDOW]: bool scalar."""
    known = jnp.sum(~jnp.isnan(recent))
    return (known >= LEAST) & (loss > guard * jnp.nanmedian(recent))


def remember(recent: jax.Array, loss: jax.Array) -> jax.Array:
    """The window with `loss` appended and its oldest loss dropped."""
    return jnp.concatenate([recent[1:], loss[None].astype(recent.dtype)])
