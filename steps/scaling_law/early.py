"""Where the training loss of a run with a forecast should be early.

The runs behind the forecast say how far above its last validation loss a run trains at a share of
its steps. The logarithm of this ratio is taken as a line in log N and log D with conjugate priors
(Bayesian linear regression, Gelman et al., Bayesian Data Analysis, 3rd edition, section 14.8), so
that few runs give a wide interval and not none. Schedules have one form in all runs of a forecast.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

from pipeline.errors import PonenteError
from steps.artifacts import Checkpoint
from steps.checkpoints.finished import NOT_OURS
from steps.scaling_law.points import Point
from training.metrics.early import Early, window
from training.metrics.metrics_log import read_log

NOISE = {0.1: 0.03, 0.25: 0.03, 0.5: 0.015}
"""Prior of the ratio's noise by share of the steps: standard deviation of its logarithm."""
_SLOPE = 0.05
"""Prior standard deviation of the ratio's change for a factor e of N or of D, as a logarithm."""
_FREEDOM = 3  # degrees of freedom of the prior of the noise

Ratios = dict[float, float]
"""By share of the steps: log of the mean training loss there over the last validation loss."""


def ratios(run: Checkpoint) -> Ratios | None:
    """Of a finished run; None where its record lacks them."""
    steps, last = run.train.steps, run.result["last"]["loss"]
    spans = {share: window(round(share * steps)) for share in NOISE}
    losses: dict[int, float] = {}
    with contextlib.suppress(PonenteError, OSError, *NOT_OURS):  # a training does not need them
        rows = read_log(run.shard("record"), kinds=["step"])
        losses = {row["step"]: row["loss"] for row in rows}
    found = {share: [losses[n] for n in span if n in losses] for share, span in spans.items()}
    means = {share: math.fsum(each) / len(each) for share, each in found.items() if each}
    usable = len(means) == len(NOISE) and all(0 < mean < math.inf for mean in means.values())
    return {share: math.log(mean / last) for share, mean in means.items()} if usable else None


def bounds(
    forecast: tuple[float, float], wanted: Point, steps: int, runs: Sequence[tuple[Point, Ratios]]
) -> list[Early]:
    """The interval of the training loss at each share, in which eight runs of ten should be.

    `forecast` is the interval of the same probability of the last loss of `wanted`, a run of
    `steps`; `runs` is not empty.
    """
    import numpy as np
    from scipy.stats import norm, t

    low, high = map(math.log, forecast)
    known = (high - low) / 2 / norm.ppf(0.9)
    sizes, own = (
        np.log([[point.parameters, point.tokens] for point in points])
        for points in ([point for point, _ in runs], [wanted])
    )
    columns = np.column_stack([np.ones(len(runs)), sizes - own])
    found = []
    for share, noise in NOISE.items():
        values = np.array([each[share] for _, each in runs])
        precision = np.diag([0.0, *[(noise / _SLOPE) ** 2] * 2])
        inverse = np.linalg.inv(columns.T @ columns + precision)
        line = inverse @ columns.T @ values
        squares = np.sum((values - columns @ line) ** 2) + line @ precision @ line
        freedom = _FREEDOM + len(runs) - 1
        variance = (_FREEDOM * noise**2 + squares) / freedom * (1 + inverse[0, 0])
        half = math.hypot(known * norm.ppf(0.9), math.sqrt(variance) * t.ppf(0.9, freedom))
        middle = (low + high) / 2 + float(line[0])
        found.append((round(share * steps), math.exp(middle - half), math.exp(middle + half)))
    return found
