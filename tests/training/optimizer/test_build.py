"""AdamW and Lion against formulas written out in NumPy, decay by name, and the dtype of moments."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import models.named as hax
from models.transformer import Transformer
from tests.training import tiny
from training.config import OptimizerConfig
from training.config.optimizer import KINDS, LARGEST_BFLOAT16_BETA
from training.optimizer import build, keep_moments_in
from training.parameter_roles import decay_mask
from training.sharding.layout import is_named


def test_decay_applies_to_matrices_only():
    """Norms and the embedding are not decayed, every matrix of a block is."""
    shapes = jax.eval_shape(lambda key: Transformer.init(tiny.MODEL, key=key), jax.random.key(0))
    flat = jax.tree_util.tree_flatten_with_path(
        decay_mask(shapes), is_leaf=lambda leaf: isinstance(leaf, bool)
    )[0]
    decayed = {jax.tree_util.keystr(path).split(".")[-2] for path, value in flat if value}
    kept = {jax.tree_util.keystr(path).split(".")[-1] for path, value in flat if not value}
    assert decayed == {"query", "key", "value", "output", "gate", "up", "down"}
    assert kept == {"embedding", "weight"}


def array(*axes, size=4):
    """Zeros with these axis names, all of one size."""
    return hax.zeros([hax.Axis(name, size) for name in axes])


@pytest.mark.parametrize(
    ("name", "axes", "decays"),
    [
        ("head", ("vocab", "embed"), True),
        ("position_embedding", ("position", "embed"), False),
        ("query_bias", ("layers", "kv_heads", "q_per_kv", "head_size"), False),
        ("bias", ("layers", "mlp"), False),
        ("query_norm", ("layers", "kv_heads", "head_size"), False),
        ("fused", ("layers", "embed", "gate_up", "mlp"), True),
        ("scale", ("layers", "embed"), False),
    ],
)
def test_decay_goes_by_name_and_axes(name, axes, decays):
    """A bias, a norm or an embedding has no decay, however many axes it has."""
    assert decay_mask({name: array(*axes)}) == {name: decays}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tables_decay_when_asked(kind):
    """Where no gradient comes, an embedding stays as it is, or shrinks as a matrix does."""
    table = {"embedding": array("vocab", "embed") + 2.0, "norm": array("embed") + 2.0}
    for decays in (False, True):
        chain = build(OptimizerConfig(kind=kind, weight_decay=0.5, decay_tables=decays))
        zeros = jax.tree.map(jax.numpy.zeros_like, table)
        directions, _ = chain.update(zeros, chain.init(table), table)
        assert np.all(directions["embedding"].array == (1.0 if decays else 0.0))
        assert np.all(directions["norm"].array == 0.0)


AXES = {"matrix": ("mlp", "embed"), "norm": ("embed",)}


def random_steps(count):
    """Parameters and a list of gradients of a matrix and a norm, float64."""
    rng = np.random.default_rng(0)
    shapes = {"matrix": (3, 4), "norm": (4,)}

    def draw():
        return {name: rng.normal(size=shape) for name, shape in shapes.items()}

    return draw(), [draw() for _ in range(count)]


def named(tree):
    """The arrays of `random_steps` as float32 named arrays."""
    return {n: hax.named(jnp.asarray(x, jnp.float32), AXES[n]) for n, x in tree.items()}


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_larger_gradients_are_scaled_down_to_the_norm(clip):
    """Directions of three steps are those of gradients that were scaled before."""
    parameters, steps = random_steps(3)
    optimizers = [build(OptimizerConfig(clip_norm=norm, epsilon=1e-4)) for norm in (clip, 1e9)]
    states = [optimizer.init(named(parameters)) for optimizer in optimizers]
    for gradient in steps:
        norm = math.sqrt(sum(float(np.sum(g**2)) for g in gradient.values()))
        scaled = {name: g * min(1.0, clip / norm) for name, g in gradient.items()}
        found = [
            optimizer.update(named(given), state, named(parameters))
            for optimizer, given, state in zip(optimizers, (gradient, scaled), states, strict=True)
        ]
        (clipped, plain), states = zip(*found, strict=True)
        for name in parameters:
            np.testing.assert_allclose(clipped[name].array, plain[name].array, rtol=1e-4)


def bfloat16(x):
    """Float64 values rounded to the nearest bfloat16."""
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), np.float64)


def test_bfloat16_moments_are_rounded_between_steps_only():
    """Adam with both moments rounded after every step, everything else exact, is what is computed.

    That the second moment too is rounded is what optax does not offer.
    """
    config = OptimizerConfig(
        moment_dtype="bfloat16", clip_norm=100.0, weight_decay=0.0, epsilon=1e-4
    )
    parameters, steps = random_steps(6)
    optimizer = build(config)
    state = optimizer.init(named(parameters))
    m = v = np.zeros((3, 4))
    for t, gradient in enumerate(steps, start=1):
        got, state = optimizer.update(named(gradient), state, named(parameters))
        m = 0.9 * m + 0.1 * gradient["matrix"]
        v = 0.95 * v + 0.05 * gradient["matrix"] ** 2
        want = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-4)
        np.testing.assert_allclose(got["matrix"].array, want, rtol=1e-4)
        m, v = bfloat16(m), bfloat16(v)
        kept = optax.tree.get(state, "nu")["matrix"]
        assert kept.dtype == jnp.bfloat16
        # A float32 value beside a rounding boundary may fall to the other side of it.
        np.testing.assert_allclose(np.asarray(kept.array, np.float64), v, rtol=2**-7)
        m, v = (
            np.asarray(optax.tree.get(state, k)["matrix"].array, np.float64) for k in ("mu", "nu")
        )


def test_largest_bfloat16_beta_is_the_largest_that_always_fades():
    """Every bfloat16 of a binade falls when multiplied by the bound; by a larger one, some stay."""
    numbers = bfloat16(1.0 + np.arange(128) / 128)
    assert len(set(numbers)) == 128
    assert np.all(bfloat16(numbers * LARGEST_BFLOAT16_BETA) < numbers)
    assert np.any(bfloat16(numbers * 0.999) == numbers)


def test_only_named_arrays_change_dtype():
    """Coefficients and counts of a state keep theirs."""
    inner = optax.chain(optax.scale_by_adam(), optax.contrib.scale_by_muon())
    state = keep_moments_in(jnp.dtype("bfloat16"), inner).init({"w": array("embed", "mlp")})
    dtypes = {
        str(leaf.dtype) for leaf in jax.tree.leaves(state, is_leaf=is_named) if not is_named(leaf)
    }
    assert dtypes == {"int32", "float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(state, is_leaf=is_named) if is_named(x)} == {
        "bfloat16"
    }
