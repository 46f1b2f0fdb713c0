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
    """The window before the first step: float32 [WINDOW]; losses enter it at its end."""
    return jnp.zeros((WINDOW,), jnp.float32)


def is_spike(recent: jax.Array, applied: jax.Array, loss: jax.Array, guard: float) -> jax.Array:
    """Whether `loss` is more than `guard` times the median of the window: bool scalar.

    `applied` steps so far, int32 scalar, gave as many losses to the window, at most WINDOW.
    """
    known = jnp.minimum(applied, WINDOW)
    unknown = jnp.arange(WINDOW) < WINDOW - known
    # No NaN and no infinity stands for an unknown loss: JAX's debugging flags would stop the run.
    rising = jnp.sort(jnp.where(unknown, jnp.finfo(jnp.float32).max, recent))
    median = 0.5 * rising[jnp.maximum(known - 1, 0) // 2] + 0.5 * rising[known // 2]
    return (known >= LEAST) & (loss > guard * median)


def remember(recent: jax.Array, loss: jax.Array) -> jax.Array:
    """The window with `loss` appended and its oldest loss dropped."""
    return jnp.concatenate([recent[1:], loss[None].astype(recent.dtype)])
