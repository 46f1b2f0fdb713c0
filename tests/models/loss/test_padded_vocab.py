"""A padded vocabulary against the same model without it: losses, gradients, logits, samples."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.generate.generate import generate
from models.generate.sampling_config import Sampling
from models.layers.axes import MeshAxes
from models.loss.cross_entropy import LossOptions, summed_losses, token_losses
from models.loss.next_token import next_token_loss, score_tokens
from models.transformer import Transformer
from tests.models import small
from tests.models.loss.test_cross_entropy import inputs, numpy_sums, plain

IDS, ROWS = 13, 24
LOUD = 50.0
"""Padding that would have most of the probability."""


def padded(head: jax.Array, rows: int = ROWS) -> jax.Array:
    return jnp.concatenate([head, jnp.full((rows - len(head), head.shape[1]), LOUD)])


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def ours(hidden, head, targets, weights, cap, chunks, mesh_axes, ids):
    def sums(hidden, head):
        options = LossOptions(0.1, cap, chunks, mesh_axes, id_count=ids)
        return summed_losses(hidden, head, targets, weights, options)

    def objective(hidden, head):
        found = sums(hidden, head)
        return found[0], found

    gradients, found = jax.grad(objective, argnums=(0, 1), has_aux=True)(hidden, head)
    return gradients, found, sums(hidden, head)


def check(gradients, sums, arrays, cap):
    """Sums are NumPy's and gradients those of the plain formula, both without the padding."""
    np.testing.assert_allclose(sums, numpy_sums(*arrays, 0.1, cap), rtol=1e-5)
    want = jax.grad(plain, argnums=(0, 1))(*arrays, 0.1, cap)
    hidden_bar, head_bar = gradients
    assert small.relative((hidden_bar, head_bar[:IDS]), want) < 1e-5
    assert not np.asarray(head_bar[IDS:]).any()


@pytest.mark.slow
@pytest.mark.parametrize(("cap", "chunks"), [(None, 3), (1.5, 1)])
def test_padding_has_no_loss_and_no_gradient(cap, chunks):
    """In chunks of positions, with a z-loss and both with and without a soft cap."""
    arrays = inputs(3, 6, IDS)
    hidden, head, *rest = arrays
    gradients, sums, alone = ours(hidden, padded(head), *rest, cap, chunks, None, IDS)
    check(gradients, sums, arrays, cap)
    np.testing.assert_allclose(alone, sums, rtol=1e-6)
    nll, best = token_losses(
        hidden, padded(head), rest[0], LossOptions(0.0, cap, chunks, id_count=IDS)
    )
    want, want_best = token_losses(hidden, head, rest[0], LossOptions(soft_cap=cap))
    np.testing.assert_allclose(nll, want, rtol=1e-5)
    np.testing.assert_array_equal(best, want_best)


SPREAD = {
    "by_the_compiler": (
        {"data": 2, "tensor": 4},
        {"batch": ("data",), "heads": ("tensor",)},
        "tensor",
    ),
    "by_hand": (
        {"data": 2, "fsdp": 4},
        {"batch": ("data", "fsdp"), "tables": ("fsdp",), "split_tables": True},
        "fsdp",
    ),
}


@pytest.mark.parametrize(("axes", "placed", "along"), SPREAD.values(), ids=SPREAD.keys())
@pytest.mark.slow
def test_padding_of_a_head_spread_over_devices(axes, placed, along):
    """Some devices hold padding alone: ids are counted over the whole axis."""
    mesh = small.mesh(**axes)
    arrays = inputs(8, 6, IDS)
    hidden, head, *rest = arrays
    by_vocab = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(along))
    with jax.set_mesh(mesh):
        spread = jax.device_put(padded(head), by_vocab)
        gradients, sums, alone = ours(hidden, spread, *rest, 2.0, 2, MeshAxes(**placed), IDS)
    check(gradients, sums, arrays, 2.0)
    np.testing.assert_allclose(alone, sums, rtol=1e-6)


def two_models(**changes) -> tuple[Transformer, Transformer]:
    """One of 61 ids, and the same with tables of 64 rows, the last of them loud."""
    plain_model = small.model(**changes)
    config = dataclasses.replace(plain_model.config, vocab_multiple=32)
    shapes = jax.eval_shape(lambda: Transformer.init(config, key=jax.random.key(0)))
    leaves, structure = jax.tree.flatten(shapes)
    pairs = zip(leaves, jax.tree.leaves(plain_model), strict=True)
    filled = [x if x.shape == shape.shape else padded(x, 64) for shape, x in pairs]
    return plain_model, jax.tree.unflatten(structure, filled)


@pytest.mark.slow
def test_a_padded_model_trains_as_the_other():
    """Objective and gradients of all parameters; the tables' padding has a gradient of zero."""
    model, wide = two_models(layers=1, tied=False)
    rows = small.named(small.tokens())
    assert wide.Vocab.size == 64

    def objective(m):
        return next_token_loss(m, rows, z_loss=0.01).objective

    np.testing.assert_allclose(small.run(objective, wide), small.run(objective, model), rtol=1e-6)
    want = small.leaves(small.gradient(objective, model))
    for path, got in small.leaves(small.gradient(objective, wide)).items():
        if got.shape != want[path].shape:
            assert not np.asarray(got[61:]).any()
            got = got[:61]
        assert small.relative(got, want[path]) < 1e-5, path


@pytest.mark.slow
def test_a_padded_model_scores_and_writes_as_the_other():
    """Token losses, logits of the ids alone, and samples: padding is never drawn."""
    model, wide = two_models(layers=1)
    rows = small.named(small.tokens())
    for function in (lambda m: score_tokens(m, rows)[0].array, lambda m: m.logits(rows).array):
        want = small.run(function, model)
        np.testing.assert_allclose(small.run(function, wide), want, rtol=1e-5, atol=1e-5)
    how = Sampling(temperature=1.0, top_k=20)
    prompts = small.tokens(batch=3, position=5).tolist()
    want = generate(model, prompts, new_tokens=12, sampling=how)
    assert generate(wide, prompts, new_tokens=12, sampling=how) == want
