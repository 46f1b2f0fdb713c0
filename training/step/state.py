"""The train state: everything that a step reads and writes, as one tree of arrays.

`step` determines the data offset (batch n is a pure function of n) and training draws no random
numbers, so a checkpoint of this tree is a checkpoint of the run.

It holds the losses of the last `WINDOW` applied steps. A step is a spike when its loss is more than
`guard` times their median, and at least `LEAST` losses are known. A spike is not applied, like a
step that is not finite; https://arxiv.org/abs/2204.02311, section 5.1, introduced skipping the
batches of spikes. The median is robust: one large loss in the window hardly moves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from models.jax_numerics import random_key
from models.shape.config import TransformerConfig
from models.transformer import Transformer
from training.config import TrainConfig
from training.sharding.layout import Layout

WINDOW = 64
LEAST = 16


def is_spike(recent: jax.Array, applied: jax.Array, loss: jax.Array, guard: float) -> jax.Array:
    """Whether `loss` is more than `guard` times the median of the window: bool scalar.

    The window, float32 [WINDOW], begins with zeros, and losses enter it at its end: one of each of
    the `applied` steps so far (int32 scalar), at most WINDOW.
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


class TrainState(eqx.Module):
    """State of a training run.

    Attributes:
        step: int32 scalar, steps done; each read one batch.
        skipped: int32 scalar, steps of these that were not applied: not finite, a loss spike, or
            without a counted token.
        model: float32 parameters.
        optimizer_state: moments, shaped and by default sharded as the parameters, and counts.
        ema: EMA of the parameters after each applied step, see `ema_weight`, or their mean from the
            first of the last ones on; those of the start before the first. None without
            `TrainConfig.ema` and `TrainConfig.average_last`.
        recent: losses of the last applied steps; None without `TrainConfig.spike_guard`.
        averaged: int32 scalar, steps in that mean; None without `TrainConfig.average_last`.
    """

    step: jax.Array
    skipped: jax.Array
    model: Transformer
    optimizer_state: optax.OptState
    ema: Transformer | None
    recent: jax.Array | None
    averaged: jax.Array | None = None

    @property
    def eval_params(self) -> Transformer:
        """The parameters to evaluate and export."""
        return self.model if self.ema is None else self.ema

    @property
    def applied(self) -> jax.Array:
        """int32 scalar, steps done that changed the model."""
        return self.step - self.skipped


def ema_weight(decay: float, applied: jax.Array) -> jax.Array:
    """The weight of the newest parameters in their EMA: float32 scalar.

    With `w = (1 - decay) / (1 - decay^t)` after t applied steps, the first of which has w = 1, the
    EMA equals the sum of `decay^(t - i) (1 - decay) / (1 - decay^t)` times the parameters after
    step i: Adam's bias correction (https://arxiv.org/abs/1412.6980, section 3), applied as it goes.
    The parameters before the first step have no weight. `applied` is t, this step included.
    """
    return (1.0 - decay) / -jnp.expm1(math.log(decay) * applied.astype(jnp.float32))


def maker(
    config: TransformerConfig, optimizer: optax.GradientTransformation, train: TrainConfig
) -> Callable[[jax.Array], TrainState]:
    """A traceable function from a key to a new state."""

    def make(key: jax.Array) -> TrainState:
        model = Transformer.init(config, key=key)
        zero = jnp.zeros((), jnp.int32)
        # optax takes any pytree; its type annotations allow fewer.
        optimizer_state = optimizer.init(cast(Any, model))
        average = train.ema or train.average_last
        return TrainState(
            step=zero,
            skipped=zero,
            model=model,
            optimizer_state=optimizer_state,
            ema=jax.tree.map(jnp.copy, model) if average else None,
            recent=jnp.zeros((WINDOW,), jnp.float32) if train.spike_guard else None,
            averaged=zero if train.average_last else None,
        )

    return make


def abstract_state(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    train: TrainConfig,
) -> TrainState:
    """The state's shapes, dtypes and shardings without arrays, for restore and AOT compilation."""
    shapes = jax.eval_shape(maker(config, optimizer, train), random_key(0))
    moments = layout.abstract(shapes.optimizer_state, layout.rules.optimizer_state)
    if layout.parallel.optimizer_memory == "host":
        moments = jax.tree.map(_in_host_memory, moments)
    return eqx.tree_at(lambda state: state.optimizer_state, layout.abstract(shapes), moments)


def _in_host_memory(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if not leaf.ndim or leaf.sharding is None:  # scalars such as counts stay
        return leaf
    return leaf.update(sharding=leaf.sharding.with_memory_kind("pinned_host"))


def shardings_of(state: Any) -> Any:
    """The sharding of every array of a concrete or abstract state."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)
