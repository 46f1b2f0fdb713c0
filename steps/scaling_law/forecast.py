"""Predict the best size, tokens and loss of a budget of FLOPs from a fitted law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steps.scaling_law.fit import Fit, TwoVariableLaw, fit_power, fit_two_variables
from steps.scaling_law.points import Point, frontier, why_not_two_variables

CONFIDENCE = 0.9
_SIZES = 1000
"""Sizes of the logarithmic grid that `buy` searches."""
_WIDER = 10.0
"""Factor by which the grid exceeds, at both ends, the runs' sizes scaled with the FLOPs."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number with its interval of confidence `CONFIDENCE`."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Purchase:
    """The predicted best run of a budget.

    Attributes:
        flops: training FLOPs.
        parameters: N.
        between: the interval of N; None for a power law in compute, where N comes from a line
            fitted to log N over log FLOPs of the runs.
        tokens: D.
        loss: nats per token.
    """

    flops: float
    parameters: float
    between: tuple[float, float] | None
    tokens: float
    loss: Interval


class ScalingLaw:
    """A law fitted to runs.

    Args:
        points: the runs.
        resamples: number of refits, which give the intervals.

    Attributes:
        runs: all runs, by size and tokens.
        points: the runs that the law was fitted to: all, or the frontier.
        fit: see `steps.scaling_law.fit`.
        why_compute: why the law is a power law in compute; empty for L(N, D).

    Raises:
        InputError: the runs determine neither law.
    """

    def __init__(self, points: Sequence[Point], resamples: int) -> None:
        self.runs = sorted(points, key=lambda point: (point.parameters, point.tokens))
        self.points = self.runs
        self.why_compute = why_not_two_variables(points)
        fit: Fit | None = None
        if not self.why_compute:
            size, tokens, losses = _columns(self.runs, "parameters", "tokens", "loss")
            fit, self.why_compute = fit_two_variables(size, tokens, losses, resamples=resamples)
        if fit is None:
            self.points = frontier(self.runs)
            flops, losses = _columns(self.points, "flops", "loss")
            fit = fit_power(flops, losses, resamples=resamples)
        self.fit = fit

    @property
    def largest(self) -> float:
        """FLOPs of the largest run."""
        return max(point.flops for point in self.runs)

    def coefficients(self) -> dict[str, Interval]:
        """The law's coefficients with their intervals, by name."""
        names = vars(self.fit.law)
        return {
            name: _interval(getattr(self.fit.law, name), getattr(self.fit.refits, name))
            for name in names
        }

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
        """The best run of a budget: N minimises L(N, D), or lies on the line through the runs."""
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
