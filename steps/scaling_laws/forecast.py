"""What a budget of FLOPs buys by a fitted law: size, tokens and loss, each with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from steps.scaling_laws.fit import Fit, TwoVariableLaw, fit_power, fit_two_variables
from steps.scaling_laws.points import Point, frontier, why_not_two_variables

CONFIDENCE = 0.9
_SIZES = 1000
"""On a logarithmic grid, of which the best is taken."""
_WIDER = 10.0
"""By how much the grid of sizes is wider than the runs', and than these grown as the FLOPs."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A number with the interval that holds it with `CONFIDENCE`."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Purchase:
    """The best that so many FLOPs buy.

    Attributes:
        flops: of the run.
        parameters: N.
        between: the interval of N; None by a power law in compute, where N is on the line through
            log N and log FLOPs of the runs.
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
        resamples: refits that intervals come from.

    Attributes:
        points: those it was fitted to, all runs or the frontier.
        fit: see `steps.scaling_laws.fit`.
        why_compute: why it is a power law in compute; empty for one in N and D.

    Raises:
        InputError: the runs determine neither.
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
        """By name."""
        names = vars(self.fit.law)
        return {
            name: _interval(getattr(self.fit.law, name), getattr(self.fit.refits, name))
            for name in names
        }

    def flops_per_token(self, parameters: Any) -> np.ndarray:
        """Training FLOPs a token of models of so many parameters.

        Between the runs' sizes the ratio to 6 N is interpolated in log N; beyond them it stays.
        """
        size, flops, tokens = _columns(self.runs, "parameters", "flops", "tokens")
        sizes, index = np.unique(size, return_inverse=True)
        ratios = np.bincount(index, flops / (6 * size * tokens)) / np.bincount(index)
        return 6 * parameters * np.interp(np.log(parameters), np.log(sizes), ratios)

    def loss_of(self, parameters: Any, flops: Any) -> np.ndarray:
        """Nats per token of so many parameters at so many FLOPs, for a law in N and D."""
        return self.fit.law.loss(parameters, flops / self.flops_per_token(parameters))

    def buy(self, flops: float) -> Purchase:
        """The best that so many FLOPs buy: N that minimises L(N, D), or that of the runs' line."""
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
