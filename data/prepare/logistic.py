"""Logistic regression with an L2 penalty, trained by L-BFGS to the same bits at any thread count.

SciPy's L-BFGS adds in BLAS, in an order that depends on the number of threads. This one adds with
NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

_MEMORY = 10  # pairs of L-BFGS
_SUFFICIENT = 1e-4  # of the predicted decrease, for a step to be accepted
_HALVINGS = 40

Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]


class Fit(NamedTuple):
    """Weights, the objective there, and the steps that were done."""

    weights: np.ndarray
    loss: float
    steps: int


def objective(matrix: Any, labels: np.ndarray, l2: float) -> Objective:
    """The mean negative log likelihood, both classes with equal weight, + l2/2 |weights|^2.

    A function of float64 [features + 1], of which the last is the bias and has no penalty, that
    gives the value and the gradient. `matrix` is a csr_array [examples, features]; both labels
    occur.
    """
    from scipy.special import expit

    sign = np.where(labels, 1.0, -1.0)
    share = np.where(labels, 0.5 / labels.sum(), 0.5 / (~labels).sum())
    transposed = matrix.T.tocsr()  # the sum of each feature is added in the examples' order

    def evaluate(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margin = sign * (matrix @ weights[:-1] + weights[-1])
        penalty = l2 / 2 * _dot(weights[:-1], weights[:-1])
        loss = np.sum(share * np.logaddexp(0.0, -margin)) + penalty
        residual = -share * sign * expit(-margin)
        gradient = np.append(transposed @ residual + l2 * weights[:-1], np.sum(residual))
        return float(loss), gradient

    return evaluate


def minimise(evaluate: Objective, size: int, *, steps: int = 200, tolerance: float = 1e-7) -> Fit:
    """Minimise a strictly convex function by L-BFGS (Nocedal and Wright 2006, algorithm 7.5).

    It begins at zero and stops when no element of the gradient exceeds `tolerance`, or at `steps`.
    """
    weights = np.zeros(size)
    loss, gradient = evaluate(weights)
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for done in range(steps):
        if np.max(np.abs(gradient)) <= tolerance:
            return Fit(weights, loss, done)
        direction = -_inverse_hessian(pairs, gradient)
        slope, scale = _dot(gradient, direction), 1.0
        for _ in range(_HALVINGS):
            there = weights + scale * direction
            new_loss, new_gradient = evaluate(there)
            if new_loss <= loss + _SUFFICIENT * scale * slope:
                break
            scale /= 2
        else:  # no smaller value differs
            return Fit(weights, loss, done)
        moved, change = there - weights, new_gradient - gradient
        if _dot(moved, change) > 0:
            pairs = [*pairs[1 - _MEMORY :], (moved, change)]
        weights, loss, gradient = there, new_loss, new_gradient
    return Fit(weights, loss, steps)


def _inverse_hessian(
    pairs: list[tuple[np.ndarray, np.ndarray]], gradient: np.ndarray
) -> np.ndarray:
    """The product of the approximated inverse Hessian and the gradient (algorithm 7.4)."""
    found = gradient.copy()
    if not pairs:
        return found / max(1.0, float(np.sum(np.abs(gradient))))
    factors = []
    for moved, change in reversed(pairs):
        factors.append(_dot(moved, found) / _dot(moved, change))
        found -= factors[-1] * change
    moved, change = pairs[-1]
    found *= _dot(moved, change) / _dot(change, change)
    for (moved, change), factor in zip(pairs, reversed(factors), strict=True):
        found += (factor - _dot(change, found) / _dot(moved, change)) * moved
    return found


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sum(a * b))


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """The probability that a good text scores more than a bad one, equal scores counting half.

    It is the Mann-Whitney statistic by ranks.
    """
    from scipy.stats import rankdata

    good, bad = int(labels.sum()), int((~labels).sum())
    return float((rankdata(scores)[labels].sum() - good * (good + 1) / 2) / (good * bad))
