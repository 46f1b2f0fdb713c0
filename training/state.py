"""Everything a step reads and writes, as one tree of arrays.

The data position is `step` itself (batch n is a pure function of n) and the model draws no random
numbers while it trains, so a checkpoint of this tree is a checkpoint of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from models.config import TransformerConfig
from models.transformer import Transformer
from training.mesh import Layout


class TrainState(eqx.Module):
    """State of a training run.

    Attributes:
        step: int32 scalar, batches seen.
        skipped: int32 scalar, how many of them were not applied because they were not finite.
        model: float32 parameters.
        optimizer_state: moments, shaped and split as the parameters, and counts.
    """

    step: jax.Array
    skipped: jax.Array
    model: Transformer
    optimizer_state: optax.OptState


def _make(
    config: TransformerConfig, optimizer: optax.GradientTransformation
) -> Callable[[jax.Array], TrainState]:
    def make(key: jax.Array) -> TrainState:
        model = Transformer.init(config, key=key)
        zero = jnp.zeros((), jnp.int32)
        # optax takes any pytree; its annotations name fewer.
        optimizer_state = optimizer.init(cast(Any, model))
        return TrainState(step=zero, skipped=zero, model=model, optimizer_state=optimizer_state)

    return make


def abstract_state(
    config: TransformerConfig, optimizer: optax.GradientTransformation, layout: Layout
) -> TrainState:
    """The state's shapes, dtypes and shardings, without a single array: for restore and AOT."""
    return layout.abstract(jax.eval_shape(_make(config, optimizer), jax.random.key(0)))


def shardings_of(state: Any) -> Any:
    """The sharding of every array of a concrete or abstract state."""
    return jax.tree.map(lambda leaf: leaf.sharding, state)


def init_state(
    config: TransformerConfig, optimizer: optax.GradientTransformation, layout: Layout, seed: int
) -> TrainState:
    """A new state, every array created on the devices that keep it."""
    target = shardings_of(abstract_state(config, optimizer, layout))
    # It runs once, and a CPU would take longer to optimise it than to run it.
    quick = {"xla_backend_optimization_level": 1} if layout.platform == "cpu" else None
    make = jax.jit(_make(config, optimizer), out_shardings=target, compiler_options=quick)
    return make(jax.random.key(seed))
