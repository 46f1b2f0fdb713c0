"""AdamW, Muon and Lion as optax chains without the learning rate.

The train step multiplies the chain's output by `schedule(step)` itself. A step that is not applied
therefore leaves the whole optimizer state unchanged, while the schedule, which counts all steps,
still ends at the last one. A group of parameters with its own learning rate has a constant factor
inside the chain.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from training.config import OptimizerConfig
from training.optimizer import muon
from training.sharding.layout import is_named


def decay_mask(model: Any, *, tables: bool = False) -> Any:
    """True where weight decay applies, one bool per named parameter of `model`.

    It applies to matrices: parameters with at least two axes besides "layers"; not to norms, biases
    and embeddings, unless `tables`. A rare token's row gets a notable gradient only when the token
    occurs, and decay would shrink it in between, also where the table is the output head.
    `TrainConfig.z_loss` bounds the size of logits instead.
    """
    other = [word for word in muon.NOT_MATRICES if not (tables and word == "embedding")]
    decays = functools.partial(muon.is_matrix, other=other)
    return jax.tree_util.tree_map_with_path(decays, model, is_leaf=is_named)


def build(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping, moments and decay: gradients -> direction d, where the update is `-rate * d`."""
    make = {"adamw": _adamw, "muon": _muon, "lion": _lion}[config.kind]
    dtype = jnp.dtype(config.moment_dtype)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        *(part if dtype == jnp.float32 else keep_moments_in(dtype, part) for part in make(config)),
    )


def keep_moments_in(
    dtype: jnp.dtype, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
    """`inner` with its moments stored in `dtype` between steps and computed in float32.

    optax has such an option for first moments only (`mu_dtype`); its second moment of Adam has the
    parameters' dtype. Moments are the named arrays of the state; counts and coefficients are plain
    arrays and keep their dtype.
    """

    def cast(state: Any, to: Any) -> Any:
        return jax.tree.map(
            lambda leaf: leaf.astype(to) if is_named(leaf) else leaf, state, is_leaf=is_named
        )

    def init(params: Any) -> Any:
        return cast(inner.init(params), dtype)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)


Transformations = tuple[optax.GradientTransformation, ...]


def _decay(config: OptimizerConfig) -> optax.GradientTransformation:
    mask = functools.partial(decay_mask, tables=config.decay_tables)
    return optax.add_decayed_weights(config.weight_decay, mask=mask)


def _adamw(config: OptimizerConfig) -> Transformations:
    # Decoupled decay: the direction is m / (sqrt(v) + eps) + weight_decay * p, m and v unbiased.
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    return adam, _decay(config)


def _lion(config: OptimizerConfig) -> Transformations:
    return optax.scale_by_lion(b1=config.lion_beta1, b2=config.lion_beta2), _decay(config)


def _muon(config: OptimizerConfig) -> Transformations:
    matrices = (muon.directions(config), _decay(config), optax.scale(config.muon_ratio))
    groups: dict[Hashable, optax.GradientTransformation] = {
        "muon": optax.chain(*matrices),
        "adamw": optax.chain(*_adamw(config)),
    }
    return (optax.partition(groups, muon.labels),)
