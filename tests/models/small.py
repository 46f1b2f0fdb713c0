"""Small models and inputs that several test modules share."""

from __future__ import annotations

import functools
import math

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest

from models.config import TransformerConfig
from models.transformer import Transformer

BASE = {
    "vocab_size": 61,
    "layers": 3,
    "embed": 24,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 8,
    "mlp": 40,
}

VARIANTS = {
    "grouped": {},
    "multi_head": {"kv_heads": 4},
    "multi_query": {"kv_heads": 1, "heads": 3},
    "untied": {"tied": False},
    "no_qk_norm": {"qk_norm": False},
    "soft_caps": {"logit_soft_cap": 1.5, "attention_soft_cap": 0.8},
    "rope_and_epsilon": {"rope_base": 300.0, "norm_epsilon": 0.1},
    "one_layer": {"layers": 1},
}


def config(**changes) -> TransformerConfig:
    return TransformerConfig(**(BASE | changes))


@functools.cache
def model(**changes) -> Transformer:
    """A model of random numbers: norm weights about one, matrices about 1/sqrt(embed)."""
    shapes = jax.eval_shape(lambda: Transformer.init(config(**changes), key=jax.random.key(0)))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        if path[-2:-1] == (jax.tree_util.GetAttrKey("weight"),):  # only norms call it so
            return rng.uniform(0.5, 1.5, leaf.shape)
        return rng.normal(size=leaf.shape) * (0.4 if len(path) == 2 else 0.2)

    return jax.tree.map_with_path(
        lambda path, leaf: jax.numpy.asarray(draw(path, leaf), leaf.dtype), shapes
    )


def init(shape: TransformerConfig) -> Transformer:
    """`Transformer.init`, compiled."""
    return eqx.filter_jit(Transformer.init)(shape, key=jax.random.key(0))


def tokens(batch: int = 2, position: int = 12, vocab: int = 61, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, (batch, position), dtype=np.int32)


def named(rows: np.ndarray) -> hax.NamedArray:
    return hax.named(jax.numpy.asarray(rows), ("batch", "position"))


def mesh(**axes: int) -> jax.sharding.Mesh:
    """A mesh of the first devices whose axes the compiler partitions by itself."""
    count = math.prod(axes.values())
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} (virtual) devices")
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    devices = jax.devices()[:count]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)


def relative(got: object, want: object) -> float:
    """Largest difference between two trees, relative to the largest number of each wanted leaf."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    pairs = [
        (np.asarray(g, np.float64), np.asarray(w, np.float64))
        for g, w in zip(got, want, strict=True)
    ]
    assert all(g.shape == w.shape for g, w in pairs)
    return max(float(abs(g - w).max() / max(abs(w).max(), 1e-30)) for g, w in pairs)


def gradient(objective, made: Transformer) -> Transformer:
    """Compiled gradient of `objective(model)`."""
    return run(eqx.filter_grad(objective), made)


def run(function, made: Transformer):
    """`function(model)` compiled: Haliax compiles every product anew when called eagerly."""
    return eqx.filter_jit(function)(made)
