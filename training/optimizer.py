"""AdamW, Muon and Lion as optax chains without the learning rate, and its schedule.

The train step multiplies the chain's output by `schedule(step)` itself, and gives the step to the
chain for the schedules of decay and momentum. A step that is not applied therefore leaves the whole
optimizer state unchanged, while the schedules, which count all steps, still end at the last one.
Parameters of one role (`training.parameter_roles`) may have a chain of their own, and a learning
rate of their own is a constant factor inside it.

Muon updates a matrix by its momentum after orthogonalization: Newton-Schulz iterations bring all
singular values near 1 (https://kellerjordan.github.io/posts/muon). Each layer of a stacked array is
a matrix of its own, and all head axes of a projection together are one side.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

import models.named as hax
from training.config import OptimizerConfig
from training.config.optimizer import Role
from training.parameter_roles import decay_mask, matrix_axes, role_of
from training.sharding.layout import Layout, is_named
from training.sharding.newton_schulz import newton_schulz, orthogonalize


def build(
    config: OptimizerConfig,
    layout: Layout | None = None,
    compute_dtype: DTypeLike = jnp.float32,
    steps: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Clipping, moments and decay: gradients -> direction d, where the update is `-rate * d`.

    Muon iterates in `compute_dtype`, on the devices of `layout`; None for one device. Schedules of
    a run of `steps` steps need the keyword `step` of `update`, the int32 number of steps done.
    """
    labels, dtype = config.labels, jnp.dtype(config.moment_dtype)
    how = {"steps": config.muon_steps, "iteration": config.muon_iteration}
    one = functools.partial(newton_schulz, **how)

    def muon(momenta: Any, _: Any) -> Any:
        found = orthogonalize(momenta, one, compute_dtype, layout)
        return _over(lambda leaf: leaf * shape_factor(leaf, config.muon_rms), found)

    parts = {label: _update(config, role, muon, steps) for role, label in labels.items()}
    if len(parts) > 1:

        def labelled(tree: Any) -> Any:
            return jax.tree_util.tree_map_with_path(
                lambda path, leaf: labels[role_of(path, leaf)], tree, is_leaf=is_named
            )

        groups: dict[Hashable, Any] = {label: optax.chain(*found) for label, found in parts.items()}
        parts = {"": (optax.partition(groups, labelled),)}
    (found,) = parts.values()
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        *(part if dtype == jnp.float32 else keep_moments_in(dtype, part) for part in found),
    )


def keep_moments_in(
    dtype: jnp.dtype, inner: optax.GradientTransformation
) -> optax.GradientTransformation:
    """`inner` with its moments stored in `dtype` between steps and computed in float32.

    Moments are the named arrays of the state; counts and coefficients are plain arrays and keep
    their dtype. optax has such an option for first moments only (`mu_dtype`).
    """

    def cast(state: Any, to: Any) -> Any:
        return _over(lambda leaf: leaf.astype(to) if is_named(leaf) else leaf, state)

    def init(params: Any) -> Any:
        return cast(inner.init(params), dtype)

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> tuple[Any, Any]:
        updates, state = every.update(updates, cast(state, jnp.float32), params, **given)
        return updates, cast(state, dtype)

    every = optax.with_extra_args_support(inner)
    return optax.GradientTransformationExtraArgs(init, update)


def _update(
    config: OptimizerConfig, role: Role, muon: Callable[[Any, Any], Any], steps: int
) -> tuple[optax.GradientTransformation, ...]:
    """The update of a role's parameters: moments, decoupled decay, its learning rate's factor."""
    group: Any = config.group(role)
    if group.kind == "adamw":
        # The direction is m / (sqrt(v) + eps) + weight_decay * p, m and v unbiased.
        moments = (optax.scale_by_adam(b1=group.beta1, b2=group.beta2, eps=group.epsilon),)
    elif group.kind == "lion":
        moments = (optax.scale_by_lion(b1=group.beta1, b2=group.beta2),)
    else:
        moments = (_momentum(config, steps), optax.stateless(muon))
        if config.muon_row_beta is not None:
            moments = (*moments, _even_rows(config.muon_row_beta))
    ratio = config.rate_ratio(role)
    factor = (optax.scale(ratio),) if ratio != 1.0 or group.kind == "muon" else ()
    return (*moments, _decay(config, role, steps), *factor)


def _decay(config: OptimizerConfig, role: Role, steps: int) -> optax.GradientTransformation:
    """Adds the decay; what a role other than "matrices" has of its own is constant and plain."""
    own, weight = getattr(config, role).weight_decay, config.group(role).weight_decay or 0.0
    mask = functools.partial(decay_mask, tables=config.decay_tables) if own is None else None
    varies = config.cautious_decay or config.weight_decay_schedule != "constant"
    if not weight or not varies or (own is not None and role != "matrices"):
        return optax.add_decayed_weights(weight, mask=mask)
    share = _share(config.weight_decay_schedule, steps)

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        def add(d: jax.Array, p: jax.Array) -> jax.Array:
            # Signs: a product of two small numbers could round to 0.
            decays = jnp.sign(d) * jnp.sign(p) >= 0.0 if config.cautious_decay else True
            return d + weight * share(given["step"]) * jnp.where(decays, p, 0.0)

        return jax.tree.map(add, updates, params), state

    found = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    return found if mask is None else optax.masked(found, mask)


def _momentum(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Means of gradients; the state is a tree as they are, where the decay has a schedule."""
    start, end = config.muon_momentum_start, config.muon_momentum_end
    if start is None and end is None:
        # Jordan's momentum over (1 - muon_momentum), a factor that the iteration divides out.
        return optax.trace(config.muon_momentum, nesterov=config.muon_nesterov)
    left = _share("wsd", steps, config.phases(steps)[1])

    def update(updates: Any, state: Any, params: Any = None, **given: Any) -> Any:
        beta, step = jnp.float32(config.muon_momentum), given["step"].astype(jnp.float32)
        if start is not None:
            beta = start + (beta - start) * jnp.minimum(step / config.muon_momentum_warmup, 1.0)
        if end is not None:
            beta = end + (beta - end) * left(step)
        mix = functools.partial(jax.tree.map, lambda m, g: beta * m + (1.0 - beta) * g)
        mean = mix(state, updates)
        return mix(mean, updates) if config.muon_nesterov else mean, mean

    zeros: Any = optax.tree.zeros_like
    return optax.GradientTransformationExtraArgs(zeros, update)


def _even_rows(beta: float) -> optax.GradientTransformation:
    """NorMuon's normalization of directions, see `OptimizerConfig.muon_row_beta`.

    The state has an array [layers, axes of the longer side...] for each matrix.
    """

    def squares(array: hax.NamedArray) -> hax.NamedArray:
        sides = [[array.axes[i] for i in side] for side in matrix_axes(array)]
        return hax.mean(hax.square(array), min(sides, key=lambda s: math.prod(a.size for a in s)))

    def even(array: hax.NamedArray, rows: hax.NamedArray) -> hax.NamedArray:
        sides = sum(matrix_axes(array), ())
        # The bounds are for rows and matrices of zeros, which no gradient reached.
        scaled = array * hax.rsqrt(hax.maximum(rows, 1e-10))
        old, new = (jnp.sum(x.array**2, axis=sides, keepdims=True) for x in (array, scaled))
        return hax.named(scaled.array * jnp.sqrt(old / jnp.maximum(new, 1e-30)), scaled.axes)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        rows = _over(lambda x, old: beta * old + (1.0 - beta) * squares(x), updates, state)
        return _over(even, updates, rows), rows

    return optax.GradientTransformation(
        lambda params: _over(lambda x: 0.0 * squares(x), params), update
    )


def _over(f: Callable[..., Any], *trees: Any) -> Any:
    """`f` of the named arrays of the first tree and what is in their places in the others."""
    return jax.tree.map(f, *trees, is_leaf=is_named)


Schedule = Callable[[jax.Array | int], jax.Array]


def schedule(config: OptimizerConfig, steps: int) -> Schedule:
    """The learning rate of step 0 <= s < steps, as a traceable function of s to a float32 scalar.

    With W warmup steps, the rate is `peak * (s + 1) / W` while s < W. After the warmup, with p
    rising linearly to 1 at the last step:

    - "cosine": `peak * (min_ratio + (1 - min_ratio) * (1 + cos(pi p)) / 2)` over all remaining
      steps (https://arxiv.org/abs/1608.03983, one cycle)
    - "linear": `peak * (1 - (1 - min_ratio) p)` over all remaining steps
    - "wsd": the peak, then as "linear" over the tail (`OptimizerConfig.decay`), with sqrt(p) for p
      where `OptimizerConfig.decay_shape` is "sqrt"
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
        fall = progress = jnp.clip((done - (steps - tail)) / max(tail, 1), 0.0, 1.0)
        if config.schedule == "cosine":
            fall = 0.5 * (1.0 - jnp.cos(math.pi * progress))
        elif config.schedule == "wsd" and config.decay_shape == "sqrt":
            fall = jnp.sqrt(progress)
        return config.learning_rate * rise * (1.0 - (1.0 - config.min_ratio) * fall)

    return rate


def _share(kind: Any, steps: int, tail: int = 0) -> Schedule:
    """A schedule of this kind as a share of its peak, without warmup, 0 at the last step."""
    whole = OptimizerConfig(learning_rate=1.0, schedule=kind, warmup=0, decay=tail, min_ratio=0)
    return schedule(whole, steps)


def shape_factor(array: hax.NamedArray, rms: float | None) -> float:
    """The factor for a direction with singular values of 1, see `OptimizerConfig.muon_rms`."""
    fan_in, fan_out = (math.prod(array.axes[i].size for i in side) for side in matrix_axes(array))
    if rms is None:
        return math.sqrt(max(1.0, fan_out / fan_in))
    # An orthogonal m x n matrix has the squared norm min(m, n), so its RMS is 1 / sqrt(max(m, n)).
    return rms * math.sqrt(max(fan_in, fan_out))
