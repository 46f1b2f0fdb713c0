"""The schedule and AdamW against formulas written out in plain Python and NumPy."""

import math

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.transformer import Transformer
from pipeline.errors import InputError
from tests.training import tiny
from training.config import OptimizerConfig
from training.optimizer import build, count_of, decay_mask, schedule


def expected_rate(config, steps, s):
    """The rate of step s, straight from the definition."""
    peak, low = config.learning_rate, config.min_ratio * config.learning_rate
    warmup = round(config.warmup * steps) if config.warmup < 1 else int(config.warmup)
    if s < warmup:
        return peak * (s + 1) / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "cosine":
        p = (s - warmup + 1) / (steps - warmup)
        return low + (peak - low) * (1 + math.cos(math.pi * p)) / 2
    tail = round(config.decay * steps) if config.decay < 1 else int(config.decay)
    if s < steps - tail:
        return peak
    return peak + (low - peak) * (s - (steps - tail) + 1) / tail


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize(
    ("steps", "warmup", "decay", "ratio"),
    [(100, 0.1, 0.2, 0.1), (37, 5, 0.3, 0.0), (10, 0, 4, 1.0), (7, 7, 0, 0.1), (1, 0, 0, 0.1)],
)
def test_schedule_is_the_formula_at_every_step(kind, steps, warmup, decay, ratio):
    """Every step's rate is that of the definition, to float32."""
    config = OptimizerConfig(
        learning_rate=3e-3, schedule=kind, warmup=warmup, decay=decay, min_ratio=ratio
    )
    got = jax.vmap(schedule(config, steps))(jnp.arange(steps))
    want = [expected_rate(config, steps, s) for s in range(steps)]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_last_step_has_the_smallest_rate(kind):
    """The last step trains at min_ratio of the peak."""
    config = OptimizerConfig(learning_rate=1.0, schedule=kind, min_ratio=0.25)
    assert float(schedule(config, 50)(49)) == pytest.approx(0.25, abs=1e-6)


def test_warmup_and_tail_must_fit():
    """Warmup and decay longer than the run are refused."""
    with pytest.raises(InputError, match="do not fit"):
        schedule(OptimizerConfig(schedule="wsd", warmup=8, decay=5), 10)
    with pytest.raises(InputError, match="do not fit"):
        schedule(OptimizerConfig(warmup=11), 10)


def test_count_of_reads_fractions_and_steps():
    """Below 1 is a fraction, 1 and above are steps."""
    assert [count_of(part, 200) for part in (0.0, 0.01, 0.5, 1, 7.0)] == [0, 2, 100, 1, 7]


def test_decay_applies_to_matrices_only():
    """Norms and the embedding are not decayed, every matrix of a block is."""
    shapes = jax.eval_shape(lambda key: Transformer.init(tiny.MODEL, key=key), jax.random.key(0))
    flat = jax.tree_util.tree_flatten_with_path(
        decay_mask(shapes), is_leaf=lambda leaf: isinstance(leaf, bool)
    )[0]
    decayed = {jax.tree_util.keystr(path).split(".")[-1] for path, value in flat if value}
    kept = {jax.tree_util.keystr(path).split(".")[-1] for path, value in flat if not value}
    assert decayed == {"query", "key", "value", "output", "gate", "up", "down"}
    assert kept == {"embedding", "weight"}


def adamw(config, gradients, parameters, decayed):
    """Descent directions of a list of gradient steps, by NumPy in float64."""
    m = {name: np.zeros_like(value) for name, value in parameters.items()}
    v = {name: np.zeros_like(value) for name, value in parameters.items()}
    directions = []
    for t, gradient in enumerate(gradients, start=1):
        norm = math.sqrt(sum(float(np.sum(g**2)) for g in gradient.values()))
        scale = min(1.0, config.clip_norm / norm)
        direction = {}
        for name in parameters:
            g = gradient[name] * scale
            m[name] = config.beta1 * m[name] + (1 - config.beta1) * g
            v[name] = config.beta2 * v[name] + (1 - config.beta2) * g**2
            m_hat = m[name] / (1 - config.beta1**t)
            v_hat = v[name] / (1 - config.beta2**t)
            direction[name] = m_hat / (np.sqrt(v_hat) + config.epsilon)
            if name in decayed:
                direction[name] = direction[name] + config.weight_decay * parameters[name]
        directions.append(direction)
    return directions


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_chain_is_adamw(clip):
    """Directions of five steps equal AdamW written out in NumPy, with and without clipping."""
    config = OptimizerConfig(clip_norm=clip, weight_decay=0.3, epsilon=1e-4)
    rng = np.random.default_rng(0)
    shapes = {"matrix": (3, 4), "norm": (4,)}
    axes = {"matrix": ("mlp", "embed"), "norm": ("embed",)}
    parameters = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    steps = [{name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(5)]

    def named(tree):
        return {n: hax.named(jnp.asarray(x, jnp.float32), axes[n]) for n, x in tree.items()}

    optimizer = build(config)
    state = optimizer.init(named(parameters))
    want = adamw(config, steps, parameters, {"matrix"})
    for gradient, expected in zip(steps, want, strict=True):
        got, state = optimizer.update(named(gradient), state, named(parameters))
        for name in shapes:
            np.testing.assert_allclose(got[name].array, expected[name], rtol=1e-4, atol=1e-6)
    assert int(optax.tree.get(state, "count")) == 5
