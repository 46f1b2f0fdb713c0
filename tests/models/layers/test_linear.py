"""Matrices between named axes: the order of an input's axes decides the order of the result's."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

import models.named as hax
from models.layers.linear import Linear

SIZES = {"batch": 2, "position": 3, "embed": 3}  # equal sizes: a mistaken axis would go unnoticed


STORED = [("embed", "mlp"), ("mlp", "embed")]
# Each with the product's axis at every place.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "stored"),
    [(order, STORED[n in (1, 2, 5)]) for n, order in enumerate(itertools.permutations(SIZES))],
)
def test_a_product_and_its_gradients_do_not_depend_on_the_order_of_axes(order, stored):
    keys = jax.random.split(jax.random.key(0), 3)
    x = hax.named(jax.random.normal(keys[0], tuple(SIZES.values())), tuple(SIZES))
    matrix = hax.named(jax.random.normal(keys[1], (3, 4)), ("embed", "mlp")).rearrange(stored)
    bias = hax.named(jax.random.normal(keys[2], (4,)), ("mlp",))

    def squares(linear, x):
        y = linear(x.rearrange(order), "embed", "mlp")
        assert [axis.name for axis in y.axes] == [{"embed": "mlp"}.get(n, n) for n in order]
        y = y.rearrange(("batch", "position", "mlp")).array
        return (y**2).sum(), y

    (_, got), (by_matrix, by_x) = jax.value_and_grad(squares, argnums=(0, 1), has_aux=True)(
        Linear(matrix, bias), x
    )
    m = matrix.rearrange(("embed", "mlp")).array
    want = np.einsum("bpe,em->bpm", x.array, m) + np.asarray(bias.array)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(
        by_matrix.matrix.rearrange(("embed", "mlp")).array,
        2 * np.einsum("bpe,bpm->em", x.array, want),
        rtol=1e-5,
    )
    np.testing.assert_allclose(by_x.array, 2 * np.einsum("bpm,em->bpe", want, m), rtol=1e-4)
