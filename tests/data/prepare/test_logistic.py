"""The logistic regression against finite differences and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, sparse

from data.prepare.logistic import area_under_curve, minimise, objective


def examples(count=60, features=40, seed=0):
    rng = np.random.default_rng(seed)
    matrix = sparse.csr_array(
        rng.normal(size=(count, features)) * (rng.random((count, features)) < 0.3)
    )
    labels = rng.random(count) < 0.3
    labels[:2] = True, False
    return matrix, labels


def reference(matrix, labels, l2, weights):
    """The definition, one example after the other."""
    total = 0.0
    for row, good in zip(matrix.toarray(), labels, strict=True):
        score = row @ weights[:-1] + weights[-1]
        chance = 1 / (1 + np.exp(-score))
        share = 0.5 / (labels == good).sum()
        total -= share * np.log(chance if good else 1 - chance)
    return total + l2 / 2 * weights[:-1] @ weights[:-1]


@given(st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_value_and_gradient(seed):
    matrix, labels = examples(seed=seed)
    evaluate = objective(matrix, labels, 0.01)
    weights = np.random.default_rng(seed).normal(size=41)
    value, gradient = evaluate(weights)
    assert value == pytest.approx(reference(matrix, labels, 0.01, weights), rel=1e-10)
    assert optimize.check_grad(lambda w: evaluate(w)[0], lambda w: evaluate(w)[1], weights) < 1e-5
    assert gradient.shape == weights.shape


@pytest.mark.parametrize("l2", [1e-1, 1e-4])
def test_the_minimum_is_scipys(l2):
    matrix, labels = examples(count=200)
    evaluate = objective(matrix, labels, l2)
    fit = minimise(evaluate, 41)
    ends = {"gtol": 1e-9, "ftol": 1e-15, "maxiter": 5000, "maxfun": 50_000}
    other = optimize.minimize(evaluate, np.zeros(41), jac=True, method="L-BFGS-B", options=ends)
    assert fit.loss == pytest.approx(other.fun, rel=1e-8)
    assert fit.weights == pytest.approx(other.x, abs=1e-3 * np.abs(other.x).max())
    assert 1 < fit.steps < 200


def test_it_ends_after_the_steps_that_are_allowed():
    evaluate = objective(*examples(), 1e-4)
    assert minimise(evaluate, 41, steps=3).steps == 3
    assert minimise(evaluate, 41, steps=3).loss < evaluate(np.zeros(41))[0]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=30))
def test_area_under_the_curve_is_the_share_of_pairs(rows):
    scores, labels = np.array([s for s, _ in rows], float), np.array([good for _, good in rows])
    if labels.all() or not labels.any():
        return
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[labels] for b in scores[~labels]]
    assert area_under_curve(scores, labels) == pytest.approx(np.mean(pairs))
