"""AdamW, Muon and Lion as optax chains without the learning rate, and its schedule.

The train step multiplies the chain's output by `schedule(step)` itself. A step that is not applied
therefore leaves the whole optimizer state unchanged, while the schedule, which counts all steps,
still ends at the last one. A group of parameters with its own learning rate has a constant factor
inside the chain.

Muon updates a matrix by its momentum after orthogonalization: Newton-Schulz iterations bring all
singular values near 1 (https://kellerjordan.github.io/posts/muon). Each layer of a stacked array is
a matrix of its own, and all head axes of a projection together are one side.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

import models.named as hax
from models.layers.axes import EMBED, LAYERS
from training.config import OptimizerConfig
from training.sharding.layout import Layout, is_named
from training.sharding.newton_schulz import orthogonalize


def decay_mask(model: Any, *, tables: bool = False) -> Any:
    """True where weight decay applies, one bool per named parameter of `model`.

    It applies to matrices: parameters with at least two axes besides "layers"; not to norms, biases
    and embeddings, unless `tables`: a rare token's row gets a notable gradient only when the token
    occurs, and decay would shrink it in between. `TrainConfig.z_loss` bounds the logits instead.
    """
    other = [word for word in NOT_MATRICES if not (tables and word == "embedding")]
    decays = functools.partial(is_matrix, other=other)
    return jax.tree_util.tree_map_with_path(decays, model, is_leaf=is_named)


def build(
    config: OptimizerConfig, layout: Layout | None = None, compute_dtype: DTypeLike = jnp.float32
) -> optax.GradientTransformation:
    """Clipping, moments and decay: gradients -> direction d, where the update is `-rate * d`.

    Muon iterates in `compute_dtype`, on the devices of `layout`; None for one device.
    """
    muon = functools.partial(_muon, layout=layout, compute_dtype=compute_dtype)
    make = {"adamw": _adamw, "muon": muon, "lion": _lion}[config.kind]
    dtype = jnp.dtype(config.moment_dtype)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        *(part if dtype == jnp.float32 else keep_moments_in(dtype, part) for part in make(config)),
    )


def keep_moments_in(
    dtype: jnp.dtype, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
    """`inner` with its moments stored in `dtype` between steps and computed in float32.

    Moments are the named arrays of the state; counts and coefficients are plain arrays and keep
    their dtype. optax has such an option for first moments only (`mu_dtype`).
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


def _muon(
    config: OptimizerConfig, layout: Layout | None, compute_dtype: DTypeLike
) -> Transformations:
    def directions(momenta: Any, _: Any) -> Any:
        found = orthogonalize(momenta, config.muon_steps, compute_dtype, layout)
        return jax.tree.map(
            lambda leaf: leaf * shape_factor(leaf, config.muon_rms), found, is_leaf=is_named
        )

    matrices = (
        # Jordan's momentum over (1 - muon_momentum), a factor that the iteration divides out.
        optax.trace(config.muon_momentum, nesterov=config.muon_nesterov),
        optax.stateless(directions),
        _decay(config),
        optax.scale(config.muon_ratio),
    )
    groups: dict[Hashable, optax.GradientTransformation] = {
        "muon": optax.chain(*matrices),
        "adamw": optax.chain(*_adamw(config)),
    }
    return (optax.partition(groups, muon_labels),)


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


# An array holds independent matrices along these axes. Two projections fused along any other axis
# are one matrix to Muon.
STACKED = (LAYERS,)

# A parameter with one of these words in its name does not multiply activations as a matrix, however
# many axes it has: it is a table of rows, or has one number per head and feature.
NOT_MATRICES = ("embedding", "bias", "norm")


def is_matrix(path: tuple[Any, ...], leaf: Any, other: Collection[str] = NOT_MATRICES) -> bool:
    """Whether a parameter has two or more axes besides "layers" and no `other` word in its name."""
    if not is_named(leaf):
        return False
    name = jax.tree_util.keystr(path).lower()
    return len(_sides(leaf)) >= 2 and not any(word in name for word in other)


def is_block_matrix(path: tuple[Any, ...], leaf: Any) -> bool:
    """Whether a parameter is a matrix of a block with "embed" as its input or output."""
    if not is_matrix(path, leaf):
        return False
    names = {axis.name for axis in leaf.axes}
    return LAYERS in names and EMBED in names


def matrix_axes(array: hax.NamedArray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the input axes (contracted with activations) and of the output axes of a matrix.

    "embed" is one side, and all other axes except the stacked ones are the other side. Parameters
    have their input axes first, so the first side is the input.
    """
    sides = _sides(array)
    names = [array.axes[i].name for i in sides]
    assert EMBED in (names[0], names[-1]), f"embed is inside {names}: not inputs first"
    embed = names.index(EMBED)
    others = tuple(i for i in sides if i != sides[embed])
    if embed == 0:
        return (sides[0],), others
    return others, (sides[embed],)


def muon_labels(tree: Any) -> Any:
    """The optimizer of each parameter of a model (or of its gradients), "muon" or "adamw"."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: "muon" if is_block_matrix(path, leaf) else "adamw",
        tree,
        is_leaf=is_named,
    )


def shape_factor(array: hax.NamedArray, rms: float | None) -> float:
    """The factor for a direction with singular values of 1, see `OptimizerConfig.muon_rms`."""
    fan_in, fan_out = (math.prod(array.axes[i].size for i in side) for side in matrix_axes(array))
    if rms is None:
        return math.sqrt(max(1.0, fan_out / fan_in))
    # An orthogonal m x n matrix has the squared norm min(m, n), so its RMS is 1 / sqrt(max(m, n)).
    return rms * math.sqrt(max(fan_in, fan_out))


def _sides(array: hax.NamedArray) -> list[int]:
    return [i for i, axis in enumerate(array.axes) if axis.name not in STACKED]
