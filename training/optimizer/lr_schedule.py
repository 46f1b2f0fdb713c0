"""The learning rate as a pure function of the training step."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from training.config import OptimizerConfig

Schedule = Callable[[jax.Array | int], jax.Array]


def schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """The learning rate of step 0 <= s < steps, as a traceable function of s to a float32 scalar.

    With W warmup steps, the rate is `peak * (s + 1) / W` while s < W. After the warmup, with p
    rising linearly to 1 at the last step:

    - "cosine": `peak * (min_ratio + (1 - min_ratio) * (1 + cos(pi p)) / 2)` over all remaining
      steps (https://arxiv.org/abs/1608.03983, one cycle)
    - "linear": `peak * (1 - (1 - min_ratio) p)` over all remaining steps
    - "wsd": the peak, then as "linear" over the tail (`OptimizerConfig.decay`)
    - "inverse_sqrt": `peak * max(sqrt(max(W, 1) / (s + 1)), min_ratio)`
    - "constant": the peak

    Raises `InputError` when warmup and decay do not fit into `steps`.
    """
    warmup, tail = config.phases(steps)
    if config.schedule in ("cosine", "linear"):
        tail = steps - warmup

    def rate(step: jax.Array | int) -> jax.Array:
        done = jnp.asarray(step, jnp.float32) + 1.0
        rise = jnp.minimum(done / max(warmup, 1), 1.0)
        if config.schedule == "inverse_sqrt":
            decayed = jnp.sqrt(max(warmup, 1) / jnp.maximum(done, max(warmup, 1)))
            return config.learning_rate * rise * jnp.maximum(decayed, config.min_ratio)
        # p of the formulas: 0 before the tail, 1 at the last step. Without a tail it stays 0.
        progress = jnp.clip((done - (steps - tail)) / max(tail, 1), 0.0, 1.0)
        if config.schedule == "cosine":
            fall = 0.5 * (1.0 - jnp.cos(math.pi * progress))
        else:
            fall = progress
        return config.learning_rate * rise * (1.0 - (1.0 - config.min_ratio) * fall)

    return rate
