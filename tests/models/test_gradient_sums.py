"""Gradients in bfloat16 where many tokens meet, row by row, beside those in float32."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

import models.named as hax
from models.layers.norms import cast
from models.loss.next_token import next_token_loss
from models.shape.config import TransformerConfig
from models.transformer import Forward
from tests.models import small

VOCAB, ROWS, POSITIONS = 512, 320, 64
SHAPE = TransformerConfig(
    vocab_size=VOCAB, layers=1, embed=64, heads=4, kv_heads=2, head_size=16, mlp=128
)
GPT2 = {"norm": "layer", "biases": True, "mlp_kind": "gelu", "positions": "learned", "context": 64}
RECIPE = {"layers": 2, "value_embeddings": "alternate", "embedding_norm": True}
RECIPE |= {"input_scale": (0.2, 0.05), "residual_scale": (1.15, 1.05)}
SHAPES = {
    "recipe": dataclasses.replace(SHAPE, **RECIPE),
    "tied": SHAPE,
    "untied": dataclasses.replace(SHAPE, tied=False),
    "gpt2": dataclasses.replace(SHAPE, **GPT2, qk_norm=False, kv_heads=4),
}


def zipf(shape):
    """Ids of which the commonest is a tenth of all, as in text."""
    weights = 1 / np.arange(1, VOCAB + 1) ** 1.1
    ids = np.random.default_rng(0).choice(VOCAB, shape, p=weights / weights.sum())
    return ids.astype(np.int32)


@functools.partial(jax.jit, static_argnames="dtype")
def gradient(model, tokens, dtype):
    """The gradient of the summed loss, computed in `dtype`, at parameters of bfloat16."""

    def loss(model):
        rows = hax.named(tokens, ("batch", "position"))
        forward = Forward(backend="reference")
        return next_token_loss(model, rows, chunks=4, forward=forward).objective

    return jax.grad(loss)(cast(cast(model, "bfloat16"), dtype))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_every_row_and_bias_has_the_gradient_of_float32(name):
    """An id that is read 2,000 times, and a bias that every token reads, as well as a matrix.

    Rounded activations err by up to a tenth; sums in bfloat16 erred by 40 %.
    """
    shape = SHAPES[name]
    model, tokens = small.init(shape), zipf((ROWS, POSITIONS))
    got, want = (small.leaves(gradient(model, tokens, d)) for d in ("bfloat16", "float32"))
    for path, exact in want.items():
        if np.linalg.norm(exact) > 1e-3:  # attention does not see a bias of all keys
            assert small.relative(got[path], exact) < 0.15, path
    read = np.bincount(tokens[:, :-1].ravel(), minlength=VOCAB)
    (table,) = [path for path in want if path.startswith(".embedding")]
    of_rows = [np.asarray(each[table], np.float64) for each in (got, want)]
    error = np.linalg.norm(of_rows[0] - of_rows[1], axis=1) / np.linalg.norm(of_rows[1], axis=1)
    assert (read > 1000).sum() >= 3
    assert error[read > 1000].max() < 0.15
