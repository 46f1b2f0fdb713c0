"""AdamW as an optax chain whose learning rate is a pure function of the training step.

The chain ends before the learning rate: the train step multiplies by `schedule(step)` itself. So a
step that was skipped because of a non-finite gradient leaves the whole optimizer state as it was,
and the schedule still ends where it should.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import optax

from pipeline.errors import InputError
from training.config import OptimizerConfig

Schedule = Callable[[jax.Array | int], jax.Array]


def count_of(part: float, steps: int) -> int:
    """Steps meant by `part`: a fraction of `steps` below 1 (rounded to nearest), else a count."""
    return round(part * steps) if part < 1.0 else int(part)


def schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """The learning rate of step 0 <= s < steps, as a traceable function of s to a float32 scalar.

    With W warmup steps: `peak * (s + 1) / W` while s < W. Then, with p running linearly to 1 at the
    last step, "cosine" is `peak * (min_ratio + (1 - min_ratio) * (1 + cos(pi p)) / 2)` over all
    remaining steps (https://arxiv.org/abs/1608.03983, one cycle), "wsd" stays at the peak and falls
    as `peak * (1 - (1 - min_ratio) p)` over its tail, "constant" stays at the peak.

    Raises:
        InputError: when warmup and decay do not fit into `steps`.
    """
    warmup = count_of(config.warmup, steps)
    tail = {
        "cosine": max(steps - warmup, 0),
        "wsd": count_of(config.decay, steps),
        "constant": 0,
    }[config.schedule]
    if warmup > steps or warmup + tail > steps:
        raise InputError(
            f"OptimizerConfig: warmup of {warmup} and decay of {tail} steps do not fit into "
            f"{steps} steps; lower warmup or decay"
        )

    def rate(step: jax.Array | int) -> jax.Array:
        done = jnp.asarray(step, jnp.float32) + 1.0
        rise = jnp.minimum(done / max(warmup, 1), 1.0)
        progress = jnp.clip((done - (steps - tail)) / max(tail, 1), 0.0, 1.0)
        if config.schedule == "cosine":
            fall = 0.5 * (1.0 - jnp.cos(math.pi * progress))
        else:
            fall = progress
        return config.learning_rate * rise * (1.0 - (1.0 - config.min_ratio) * fall)

    return rate


def decay_mask(model: Any) -> Any:
    """True where weight decay applies, one bool per named parameter of `model`.

    It applies to matrices: parameters with at least two axes beside "layers". Norm weights and
    biases have one. A parameter under a name with "embedding" in it has none either: a row is only
    touched when its token occurs, and decay would act on it at every step.
    """

    def decays(path: tuple[Any, ...], leaf: Any) -> bool:
        if not isinstance(leaf, hax.NamedArray):
            return False
        matrix = sum(axis.name != "layers" for axis in leaf.axes) >= 2
        return matrix and "embedding" not in jax.tree_util.keystr(path).lower()

    return jax.tree_util.tree_map_with_path(
        decays, model, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray)
    )


def build(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping, Adam moments and decay: gradients to a descent direction before `-rate`."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
    )
