"""Fit scaling laws to the losses of runs, and predict what a budget of FLOPs buys.

L(N, D) = E + A / N^alpha + B / D^beta by approach 3 of Hoffmann et al., 2022 (arXiv:2203.15556,
section 3.3): minimise the sum of Huber losses of log L, of width 0.001, from a grid of starts. The
minimiser is scipy's `least_squares` and not L-BFGS, which stopped before the minimum in that paper
(Besiroglu et al., 2024, arXiv:2404.10102).

Intervals come from a parametric bootstrap (Efron and Tibshirani, 1993, chapter 6): runs keep their
N and D, losses are drawn around the fitted law, and the law is fitted again. The variance of the
noise in log L is the sum of squared residuals divided by a chi-square draw, so that few runs give
the wide intervals of Student's t. Resampling the runs could drop whole sizes of a small ladder.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from steps.scaling_law.points import COEFFICIENTS, Point, frontier, why_not_two_variables

HUBER = 1e-3
"""Width of the quadratic part in log L, as in Hoffmann et al."""
EXPONENTS = (0.01, 3.0)
"""Bounds of alpha and beta."""
_STARTS = (0.1, 0.2, 0.35, 0.5, 0.8, 1.2, 2.0)
"""Starts of alpha and of beta; E, A and B follow by linear least squares."""
_REFINED = 6  # number of starts, the best ones, that are minimised
_NEGLIGIBLE = 1e-5  # share of the loss below which a term counts as absent
CONFIDENCE = 0.9
_SIZES = 1000
"""Sizes of the logarithmic grid that `buy` searches."""
_WIDER = 10.0
"""Factor by which the grid exceeds, at both ends, the runs' sizes scaled with the FLOPs."""


@dataclass(frozen=True)
class TwoVariableLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta in nats per token.

    Coefficients are float64 [], or [fit, 1] for many laws at once.
    """

    E: np.ndarray
    A: np.ndarray
    alpha: np.ndarray
    B: np.ndarray
    beta: np.ndarray

    def loss(self, parameters: Any, tokens: Any) -> np.ndarray:
        """float64: the loss of a size after a number of tokens; all inputs broadcast."""
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta


@dataclass(frozen=True)
class PowerLaw:
    """L(C) = K / C^gamma in nats per token, C in FLOPs; coefficients as of `TwoVariableLaw`."""

    K: np.ndarray
    gamma: np.ndarray

    def loss(self, flops: Any) -> np.ndarray:
        """float64: the loss after a number of FLOPs; argument and coefficients broadcast."""
        return self.K * flops**-self.gamma


@dataclass(frozen=True)
class Fit:
    """A fitted law and its uncertainty.

    Attributes:
        law: fit to the measured losses, a `TwoVariableLaw` or a `PowerLaw`.
        refits: fits to bootstrap losses, with coefficients [resamples, 1].
        fitted: float64 [runs], the law's losses of the runs.
        noise: standard deviation of log L of one run around the law.
    """

    law: Any
    refits: Any
    fitted: np.ndarray
    noise: float


def fit_two_variables(
    parameters: np.ndarray, tokens: np.ndarray, losses: np.ndarray, resamples: int
) -> tuple[Fit | None, str]:
    """The fit of L(N, D) and ""; or None and the reason why the losses do not determine it."""
    search = _Search(parameters, tokens)
    best = search.from_grid(np.log(losses))
    if reason := search.absent(best, losses):
        return None, reason
    log_fitted = search.log_loss(best)
    noise, drawn = _drawn(np.log(losses) - log_fitted, COEFFICIENTS, resamples)
    # To much less than the differences between refits.
    again = np.array([search.minimum(log_fitted + each, best, 1e-6).x for each in drawn])
    law = TwoVariableLaw(*search.coefficients(best))
    refits = TwoVariableLaw(*(each[:, None] for each in search.coefficients(again)))
    return Fit(law, refits, np.exp(log_fitted), noise), ""


def fit_power(flops: np.ndarray, losses: np.ndarray, resamples: int) -> Fit:
    """The power law in compute, by least squares of log L; it needs three runs or more."""
    x, y = np.log(flops), np.log(losses)
    slope, level = np.polyfit(x, y, 1)
    log_fitted = level + slope * x
    noise, drawn = _drawn(y - log_fitted, 2, resamples)
    slopes, levels = np.polyfit(x, (log_fitted + drawn).T, 1)
    law = PowerLaw(np.exp(level), -slope)
    refits = PowerLaw(np.exp(levels)[:, None], -slopes[:, None])
    return Fit(law, refits, np.exp(log_fitted), noise)


def _drawn(residuals: np.ndarray, coefficients: int, resamples: int) -> tuple[float, np.ndarray]:
    """The noise's standard deviation, and draws of the noise [resamples, runs].

    Every resample has its own variance, the sum of squares divided by a chi-square draw.
    """
    freedom = len(residuals) - coefficients
    squares = float(np.sum(residuals**2))
    random = np.random.default_rng(0)
    scales = np.sqrt(squares / random.chisquare(freedom, (resamples, 1)))
    return (squares / freedom) ** 0.5, scales * random.standard_normal((resamples, len(residuals)))


class _Search:
    """Minima over (log E, log A', log B', alpha, beta).

    A' and B' are the two terms at the geometric means of N and D. A and B themselves are the terms
    at N = 1 and D = 1, far outside of the runs; they correlate so strongly with alpha and beta that
    the minimum would lie in a long, narrow valley.
    """

    def __init__(self, parameters: np.ndarray, tokens: np.ndarray) -> None:
        self.middle = np.mean(np.log(parameters)), np.mean(np.log(tokens))
        self.n = np.log(parameters) - self.middle[0]
        self.d = np.log(tokens) - self.middle[1]

    def terms(self, theta: np.ndarray) -> np.ndarray:
        """float64 [3, runs]: E, A / N^alpha, B / D^beta."""
        e, a, b, alpha, beta = theta
        return np.exp([np.full_like(self.n, e), a - alpha * self.n, b - beta * self.d])

    def log_loss(self, theta: np.ndarray) -> np.ndarray:
        """float64 [runs]: log L."""
        return np.log(self.terms(theta).sum(axis=0))

    def from_grid(self, log_losses: np.ndarray) -> np.ndarray:
        """The lowest minimum reached from the best starts of the grid."""
        # At fixed exponents L is linear in E, A' and B'. Dividing its equations by the losses makes
        # the residuals relative, close to those of log L.
        losses = np.exp(log_losses)
        starts = []
        for alpha, beta in itertools.product(_STARTS, repeat=2):
            columns = [np.ones_like(self.n), np.exp(-alpha * self.n), np.exp(-beta * self.d)]
            relative = np.stack(columns, axis=1) / losses[:, None]
            linear, distance = nnls(relative, np.ones(len(losses)))
            start = np.array([*np.log(np.maximum(linear, 1e-300)), alpha, beta])
            starts.append((distance, start))
        starts.sort(key=lambda each: each[0])
        found = [self.minimum(log_losses, start, 1e-12) for _, start in starts[:_REFINED]]
        return min(found, key=lambda each: each.cost).x

    def coefficients(self, theta: np.ndarray) -> tuple[np.ndarray, ...]:
        """E, A, alpha, B, beta, of theta [5] or [fits, 5]."""
        e, a, b, alpha, beta = np.moveaxis(theta, -1, 0)
        scales = a + alpha * self.middle[0], b + beta * self.middle[1]
        return np.exp(e), np.exp(scales[0]), alpha, np.exp(scales[1]), beta

    def absent(self, theta: np.ndarray, losses: np.ndarray) -> str:
        """The reason why a term is absent: it is negligible or its exponent at a bound; or ""."""
        floor = np.log(2 * _NEGLIGIBLE * losses.min())
        low, high = EXPONENTS
        for which, name in enumerate(("N, the model's size", "D, the tokens")):
            scale, exponent = theta[1 + which], theta[3 + which]
            if scale < floor or not 1.01 * low < exponent < 0.99 * high:
                return f"the losses do not fall with a power of {name}"
        return ""

    def minimum(self, log_losses: np.ndarray, start: np.ndarray, tolerance: float) -> Any:
        """The minimum reached from `start`, as scipy's result."""
        lowest, highest = log_losses.min(), log_losses.max()
        floor = lowest + np.log(_NEGLIGIBLE)
        low = np.array([floor, floor, floor, EXPONENTS[0], EXPONENTS[0]])
        high = np.array([lowest, highest + 2, highest + 2, EXPONENTS[1], EXPONENTS[1]])
        inside = np.clip(start, low + 1e-9, high - 1e-9)

        def distance(theta: np.ndarray) -> np.ndarray:
            return self.log_loss(theta) - log_losses

        def slopes(theta: np.ndarray) -> np.ndarray:
            # d log L / d theta = (d L / d theta) / L, where every term is an exponential of theta.
            e, x, y = self.terms(theta)
            return np.stack([e, x, y, -self.n * x, -self.d * y], axis=1) / (e + x + y)[:, None]

        how: dict[str, Any] = {"loss": _huber, "f_scale": HUBER, "max_nfev": 500}
        how |= dict.fromkeys(("ftol", "xtol", "gtol"), tolerance)
        return least_squares(distance, inside, slopes, bounds=(low, high), **how)


def _huber(squares: np.ndarray) -> np.ndarray:
    """rho(z), rho'(z) and 0 for z = (residual / width)^2, [3, runs]: twice Huber's function.

    rho(z) = z up to 1 and 2 sqrt(z) - 1 above. The second derivative is set to 0, so scipy uses the
    curvature of least squares with Huber's weights, which stays positive where most residuals are
    beyond the width.
    """
    root = np.sqrt(np.maximum(squares, 1.0))
    value = np.where(squares <= 1.0, squares, 2.0 * root - 1.0)
    return np.stack([value, 1.0 / root, np.zeros_like(squares)])


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number with its interval of confidence `CONFIDENCE`."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Purchase:
    """The best run of a budget; `between`, unless by a power law in compute, of its parameters."""

    flops: float
    parameters: float
    between: tuple[float, float] | None
    tokens: float
    loss: Interval


class ScalingLaw:
    """A law fitted to runs; `InputError` where they determine none.

    Attributes:
        runs: all runs, by size and tokens.
        points: the runs that the law was fitted to: all, or the frontier.
        why_compute: why the law is a power law in compute; empty for L(N, D).
    """

    def __init__(self, points: Sequence[Point], resamples: int) -> None:
        self.runs = sorted(points, key=lambda point: (point.parameters, point.tokens))
        self.points = self.runs
        self.why_compute = why_not_two_variables(points)
        fit: Fit | None = None
        if not self.why_compute:
            size, tokens, losses = _columns(self.runs, "parameters", "tokens", "loss")
            fit, self.why_compute = fit_two_variables(size, tokens, losses, resamples)
        if fit is None:
            self.points = frontier(self.runs)
            flops, losses = _columns(self.points, "flops", "loss")
            fit = fit_power(flops, losses, resamples)
        self.fit = fit

    @property
    def largest(self) -> float:
        """FLOPs of the largest run."""
        return max(point.flops for point in self.runs)

    def coefficients(self) -> dict[str, Interval]:
        """The law's coefficients with their intervals, by name."""
        refits = vars(self.fit.refits)
        return {name: _interval(c, refits[name]) for name, c in vars(self.fit.law).items()}

    def flops_per_token(self, parameters: Any) -> np.ndarray:
        """Training FLOPs per token of models with these numbers of parameters.

        The ratio to 6 N is interpolated in log N between the runs' sizes, and constant beyond them.
        """
        size, flops, tokens = _columns(self.runs, "parameters", "flops", "tokens")
        sizes, index = np.unique(size, return_inverse=True)
        ratios = np.bincount(index, flops / (6 * size * tokens)) / np.bincount(index)
        return 6 * parameters * np.interp(np.log(parameters), np.log(sizes), ratios)

    def loss_of(self, parameters: Any, flops: Any) -> np.ndarray:
        """Loss in nats per token by size and training FLOPs, for a law in N and D."""
        return self.fit.law.loss(parameters, flops / self.flops_per_token(parameters))

    def buy(self, flops: float) -> Purchase:
        """The best run of a budget: N minimises L(N, D), or is on the runs' line of log N and C."""
        if isinstance(self.fit.law, TwoVariableLaw):
            return self._minimum(flops)
        spent, sizes = (np.log(each) for each in _columns(self.points, "flops", "parameters"))
        size = float(np.exp(np.polyval(np.polyfit(spent, sizes, 1), np.log(flops))))
        return Purchase(
            flops=flops,
            parameters=size,
            between=None,
            tokens=float(flops / self.flops_per_token(size)),
            loss=_interval(self.fit.law.loss(flops), self.fit.refits.loss(flops)),
        )

    def _minimum(self, flops: float) -> Purchase:
        more = flops / self.largest
        low = self.runs[0].parameters * min(1.0, more) / _WIDER
        high = self.runs[-1].parameters * max(1.0, more) * _WIDER
        sizes = np.geomspace(low, high, _SIZES)
        tokens = flops / self.flops_per_token(sizes)
        losses, again = (law.loss(sizes, tokens) for law in (self.fit.law, self.fit.refits))
        best = int(np.argmin(losses))
        # Every refit has its own best size; the interval is of these sizes.
        likely = _interval(sizes[best], sizes[np.argmin(again, axis=1)])
        return Purchase(
            flops=flops,
            parameters=likely.value,
            between=(likely.low, likely.high),
            tokens=float(tokens[best]),
            loss=_interval(losses[best], np.min(again, axis=1)),
        )


def _columns(points: Sequence[Point], *names: str) -> list[np.ndarray]:
    return [np.array([getattr(point, name) for point in points], np.float64) for name in names]


def _interval(value: Any, refits: np.ndarray) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(refits, [tail, 1 - tail])
    return Interval(value=float(value), low=float(low), high=float(high))
