"""The loss against NumPy and against plain automatic differentiation."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest

from models.generate.generate import generate
from models.generate.sampling_config import Sampling
from models.layers.axes import MeshAxes
from models.loss.next_token import next_token_loss, score_tokens
from models.transformer import Forward, Transformer
from tests.models import reference, small
from tests.models.loss.test_cross_entropy import padded

SHAPES = {
    "tied": {},
    "untied": {"tied": False},
    "soft_cap": {"logit_soft_cap": 1.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_loss_equals_the_oracle(changes):
    """Total, z and count are NumPy's sums over all positions but the last."""
    model, rows = small.model(**changes), small.tokens()
    loss = small.run(lambda m: next_token_loss(m, small.named(rows), z_loss=0.01), model)
    nll, lse = reference.nll(model, rows)
    np.testing.assert_allclose(loss.total, nll.sum(), rtol=1e-5)
    np.testing.assert_allclose(loss.z, 0.01 * (lse**2).sum(), rtol=1e-5)
    np.testing.assert_allclose(loss.objective, loss.total + loss.z, rtol=1e-6)
    assert loss.count == nll.size
    assert {part.dtype.name for part in (loss.objective, loss.total, loss.z, loss.count)} == {
        "float32"
    }


@pytest.mark.slow
def test_scores_of_tokens_equal_the_oracle():
    """Position i has the nll of token i + 1, the last position 0; and whether that is the best."""
    model, rows = small.model(), small.tokens()
    budget = rows.size * 61 * 4 // 3
    got, best = small.run(lambda m: score_tokens(m, small.named(rows), budget=budget), model)
    assert [axis.name for axis in got.axes] == ["batch", "position"]
    likely = np.argmax(model.logits(small.named(rows)).array[:, :-1], axis=-1)
    np.testing.assert_array_equal(best.array[:, :-1], likely == rows[:, 1:])
    np.testing.assert_allclose(got.array[:, :-1], reference.nll(model, rows)[0], atol=1e-4)
    np.testing.assert_array_equal(got.array[:, -1], 0.0)


@pytest.mark.slow
def test_masked_predictions_have_no_gradient():
    """A target behind the mask may be any token."""
    model, rows = small.model(), small.tokens(batch=1)
    weight = np.ones((1, 12), bool)
    weight[0, 5:] = False
    other = rows.copy()
    other[0, 6:] = (other[0, 6:] + 1) % 61

    def gradients(rows):
        def objective(model):
            tokens = small.named(rows)
            return next_token_loss(model, tokens, loss_mask=small.named(weight)).objective

        return small.gradient(objective, model)

    assert small.relative(gradients(other), gradients(rows)) < 1e-6


def loops(**options) -> list[int]:
    """Lengths of the loops in the traced scores of 8 rows of 12 positions and 61 ids."""
    model, rows = small.model(), small.named(small.tokens(batch=8))
    traced = jax.make_jaxpr(lambda: score_tokens(model, rows, **options))()
    return [int(found) for found in re.findall(r"length=(\d+)", str(traced))]


def test_auto_reads_the_shards_of_the_placement():
    """Axes that divide the batch divide a device's logits; tensor axes do not."""
    options = {"budget": 8 * 12 * 61 * 4 // 6}
    assert 6 in loops(**options)
    data = MeshAxes(("data",), ("tensor",))
    with jax.set_mesh(small.mesh(data=4, tensor=2)):
        assert 6 not in loops(**options, forward=Forward(mesh_axes=data))
        assert 2 in loops(**options, forward=Forward(mesh_axes=data))


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
