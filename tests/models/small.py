"""Small models and inputs that several test modules share."""

from __future__ import annotations

import functools
import math

import equinox as eqx
import jax
import numpy as np
import pytest

import models.named as hax
from models.shape.config import RopeScaling, TransformerConfig, YarnScaling
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

SCALING = RopeScaling(
    factor=4.0, low_frequency_factor=1.0, high_frequency_factor=6.0, original_context=120
)
"""At base 500, a head of 8 has one pair kept, one blended and two slowed."""

VARIANTS = {
    "grouped": {},
    "multi_head": {"kv_heads": 4},
    "multi_query": {"kv_heads": 1, "heads": 3},
    "untied": {"tied": False},
    "no_qk_norm": {"qk_norm": False},
    "soft_caps": {"logit_soft_cap": 1.5, "attention_soft_cap": 0.8},
    "rope_and_epsilon": {"rope_base": 300.0, "norm_epsilon": 0.1},
    "one_layer": {"layers": 1},
    "relu2": {"mlp_kind": "relu2"},
    "relu": {"mlp_kind": "relu"},
    "gelu": {"mlp_kind": "gelu"},
    "plain_rms": {"norm": "plain_rms"},
    "layer_norm": {"norm": "layer"},
    "layer_norm_no_qk_norm": {"norm": "layer", "qk_norm": False},
    "biases": {"biases": True},
    "biases_without_gate": {"biases": True, "mlp_kind": "relu"},
    "learned_positions": {"positions": "learned", "context": 15},
    "rope_scaling": {"rope_base": 500.0, "rope_scaling": SCALING},
    "yarn": {
        "rope_base": 500.0,
        "rope_scaling": YarnScaling(factor=4.0, original_context=200, beta_fast=8.0),
    },
    "nanochat": {
        "vocab_multiple": 16,
        "embedding_norm": True,
        "qkv_biases": True,
        "tied": False,
        "mlp_kind": "relu2",
        "norm_epsilon": 0.1,
    },
    "all_short": {"window_pattern": "S", "window": 3},
    "short_long": {"window_pattern": "SL", "window": 3, "layers": 4},
    "three_short_one_long": {"window_pattern": "SSSL", "window": 4, "layers": 6},
    "recipe": {
        "residual_scale": (1.15, 1.05),
        "input_scale": (0.2, 0.05),
        "value_embeddings": "alternate",
        "query_key_scale": 1.2,
        "embedding_norm": True,
        "norm": "plain_rms",
        "mlp_kind": "relu2",
        "tied": False,
        "vocab_multiple": 16,
        "window_pattern": "SL",
        "window": 4,
        "layers": 5,
    },
    "last_layer_has_a_table": {
        "value_embeddings": "alternate",
        "residual_scale": (1.0, 1.0),
        "layers": 2,
    },
    "gpt2": {
        "positions": "learned",
        "context": 12,
        "norm": "layer",
        "biases": True,
        "mlp_kind": "gelu",
        "qk_norm": False,
        "kv_heads": 4,
    },
}


def config(**changes) -> TransformerConfig:
    return TransformerConfig(**(BASE | changes))


@functools.cache
def model(**changes) -> Transformer:
    """A model of random numbers: norm weights and factors about one, the rest about zero."""
    shapes = jax.eval_shape(lambda: Transformer.init(config(**changes), key=jax.random.key(0)))
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        if path[-2].name in ("weight", "residual_scale"):  # only norms have the former
            return rng.uniform(0.5, 1.5, leaf.shape)
        return rng.normal(size=leaf.shape) * (0.4 if len(path) == 2 else 0.2)

    return jax.tree.map_with_path(
        lambda path, leaf: jax.numpy.asarray(draw(path, leaf), leaf.dtype), shapes
    )


def leaves(made: Transformer) -> dict[str, jax.Array]:
    """Arrays by their path."""
    return {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(made)}


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
    """`function(model)` compiled: Haliax compiles every matmul anew when called eagerly."""
    return eqx.filter_jit(function)(made)
