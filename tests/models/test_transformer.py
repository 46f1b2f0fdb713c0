"""The whole model against the NumPy oracle, and the laws it must obey."""

from __future__ import annotations

from decimal import Decimal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models.named as hax
from models.layers.block import rotary_angles
from models.layers.norms import cast
from models.shape.config import TransformerConfig
from models.shape.footprint import parameter_axes
from models.transformer import Forward, Transformer
from pipeline.errors import InputError
from tests.models import reference, small

logits_of = eqx.filter_jit(lambda model, tokens, **options: model.logits(tokens, **options).array)


@pytest.mark.slow
@pytest.mark.parametrize("changes", small.VARIANTS.values(), ids=small.VARIANTS.keys())
def test_logits_equal_the_oracle(changes):
    """Every variant computes what float64 loops over the formulas compute."""
    model, rows = small.model(**changes), small.tokens()
    want = reference.logits(model, rows)
    assert abs(want).max() > 0.3
    np.testing.assert_allclose(logits_of(model, small.named(rows)), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", small.VARIANTS.values(), ids=small.VARIANTS.keys())
def test_the_axes_of_parameters_follow_from_the_shape(changes):
    """Without JAX; those of a norm also where the norm has no parameters."""
    config = TransformerConfig(**{**small.BASE, **changes})
    shapes = jax.eval_shape(lambda key: Transformer.init(config, key=key), jax.random.key(0))
    arrays = jax.tree.leaves(shapes, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))
    found = {frozenset((axis.name, axis.size) for axis in array.axes) for array in arrays}
    stated = {frozenset(axes.items()) for axes in parameter_axes(config)}
    assert found <= stated
    assert found == stated or config.norm == "plain_rms"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped", "untied", "recipe"])
def test_both_orders_of_axes_compute_the_same(name):
    """Features first, as on a TPU, or tokens first: the same logits and gradients."""
    model, rows = small.model(**small.VARIANTS[name]), small.named(small.tokens())
    turned, straight = (
        logits_of(model, rows, forward=Forward(features_first=first)) for first in (True, False)
    )
    np.testing.assert_allclose(turned, straight, atol=2e-5)

    def cubes(first):  # the sum of squares after a norm without weights is a constant
        def objective(model):
            hidden = model.hidden(rows, forward=Forward(features_first=first, remat="matmuls"))
            assert hidden.axes[0].name == ("embed" if first else "batch")
            return hax.sum(hidden * hax.square(hidden)).array

        return small.gradient(objective, model)

    assert small.relative(cubes(True), cubes(False)) < 1e-5


@pytest.mark.parametrize("name", ["grouped", "three_short_one_long", "gpt2", "recipe"])
@pytest.mark.slow
def test_segments_equal_the_oracle(name):
    """Attention stays inside a segment, wherever its borders are in each row."""
    model, rows = small.model(**small.VARIANTS[name]), small.tokens()
    ids = np.array([[0] * 5 + [1] * 7, [3] * 1 + [4] * 8 + [5] * 3], np.int32)
    got = logits_of(model, small.named(rows), segment_ids=small.named(ids))
    np.testing.assert_allclose(got, reference.logits(model, rows, ids), atol=1e-4, rtol=1e-4)
    assert abs(got - logits_of(model, small.named(rows))).max() > 1e-2


@pytest.mark.slow
def test_rows_longer_than_the_learned_positions_are_refused():
    """There is no vector for a position beyond the context; the message says both lengths."""
    model = small.model(positions="learned", context=8)
    assert model.logits(small.named(small.tokens(position=8))).size == 2 * 8 * 61
    with pytest.raises(InputError, match="at most 8 positions"):
        model.hidden(small.named(small.tokens(position=9)))


@pytest.mark.parametrize("base", [10_000.0, 500_000.0, 1_000_000.0])
def test_frequencies_are_rounded_once(base):
    """Of every pair of a head of 128: the nearest float32 of base^(-2i / 128)."""
    exact = np.array([float(Decimal(base) ** (Decimal(-2 * i) / 128)) for i in range(64)])
    one = hax.named(np.ones(1, np.int32), "position")
    angles = jax.jit(lambda p: rotary_angles(p, hax.Axis("head_size", 128), base))(one)
    np.testing.assert_array_equal(angles.array[:, 0], exact.astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("changes", small.VARIANTS.values(), ids=small.VARIANTS.keys())
def test_every_variant_computes_in_bfloat16(changes):
    """No knob brings float32 into the residual stream, nor makes logits of less."""
    model, rows = cast(small.model(**changes), jnp.bfloat16), small.named(small.tokens())
    assert eqx.filter_eval_shape(model.hidden, rows).dtype == jnp.bfloat16
    assert eqx.filter_eval_shape(model.logits, rows).dtype == jnp.float32
    wide = {p for p, x in small.leaves(model).items() if x.dtype == jnp.float32}
    assert all("norm" in path or "_scale" in path for path in wide)
    assert all(path in wide for path in small.leaves(model) if "norm" in path)


@pytest.mark.slow
def test_gradients_through_cast_are_float32():
    """The gradient with respect to the stored parameters has their dtype."""
    rows = small.named(small.tokens())
    grads = small.gradient(
        lambda m: hax.mean(cast(m, jnp.bfloat16).logits(rows)).array, small.model()
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
