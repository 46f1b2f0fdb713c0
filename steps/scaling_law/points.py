"""The points of a scaling law, and the form of law that they can determine.

It imports no large library, because `plan` uses it before any training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import covariance, pvariance

from models.shape.config import TransformerConfig
from models.shape.footprint import training_flops_per_token
from pipeline import InputError
from training.config import TrainConfig
from training.config.batch_schedule import batch_phases

COEFFICIENTS = 5
"""Of L(N, D): E, A, alpha, B and beta."""
_APART = 1.05
"""Sizes, or token counts, within this factor of each other count as one."""
_BUDGETS_APART = 1.2
"""The same for FLOPs, which differ more: runs have a whole number of steps."""
_NARROW = 0.1
"""Least standard deviation of (log N, log D) across their principal axis, in natural logarithms. A
ladder of four sizes at two budgets that differ by a factor of two has 0.25."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run.

    Attributes:
        parameters: N, embeddings included (Hoffmann et al., 2022).
        tokens: D, positions trained on.
        flops: of training, by `models.shape.footprint` (causal).
        loss: loss on a held-out split, nats per token; NaN before the run.
    """

    name: str
    parameters: int
    tokens: int
    flops: float
    loss: float = math.nan


def point_of(name: str, model: TransformerConfig, train: TrainConfig, loss: float) -> Point:
    """The point of a run; its configuration must have the steps and the sequences' length."""
    tokens, flops = spent(model, train)
    return Point(name=name, parameters=model.parameter_count, tokens=tokens, flops=flops, loss=loss)


def spent(model: TransformerConfig, train: TrainConfig, done: int = 0) -> tuple[int, float]:
    """Tokens and FLOPs (causal) of a run's steps after the first `done`; `steps` must be set."""
    tokens, flops = 0, 0.0
    for phase in batch_phases(train):
        count = max(phase.end - max(phase.first, done), 0) * phase.rows * train.sequence_length
        length = train.sequence_length // phase.pieces
        tokens += count
        flops += count * training_flops_per_token(model, length, causal=True)
    return tokens, flops


def why_not_two_variables(points: Sequence[Point]) -> str:
    """The reason why N and D of the points cannot determine L(N, D); empty if they can."""
    if len(points) <= COEFFICIENTS:
        return f"{len(points)} runs, L(N, D) needs {COEFFICIENTS + 1}"
    for what, values in (
        ("model sizes", [point.parameters for point in points]),
        ("token counts", [point.tokens for point in points]),
    ):
        if (count := len(groups(values, _APART))) < 3:
            return f"{count} {what}, L(N, D) needs 3"
    if _spread(points) < _NARROW:
        return "log N and log D of the runs lie on one line, which leaves their shares open"
    return ""


def same_budget(points: Sequence[Point]) -> list[list[Point]]:
    """The points grouped by budget, in ascending order of FLOPs."""
    found = groups([point.flops for point in points], _BUDGETS_APART)
    return [[points[index] for index in group] for group in found]


def frontier(points: Sequence[Point]) -> list[Point]:
    """The point of lowest loss of each budget, without budgets that lower the loss no further."""
    best: list[Point] = []
    for group in same_budget(points):
        lowest = min(group, key=lambda point: point.loss)
        if not best or lowest.loss < best[-1].loss:
            best.append(lowest)
    check_frontier(len(best))
    return best


def check_frontier(budgets: int) -> None:
    """Refuse a power law in compute through fewer than three budgets."""
    if budgets < 3:
        raise InputError(
            f"a power law in compute needs runs of 3 budgets that lower the loss, found {budgets}; "
            "add runs of other FLOPs"
        )


def groups(values: Sequence[float], apart: float) -> list[list[int]]:
    """Indices of the values in groups; a group spans a factor `apart` from its smallest value."""
    found: list[list[int]] = []
    for index in sorted(range(len(values)), key=lambda index: values[index]):
        if found and values[index] <= apart * values[found[-1][0]]:
            found[-1].append(index)
        else:
            found.append([index])
    return found


def short(count: float) -> str:
    """A count with three digits and a unit: 82.0k, 1.24B."""
    count = float(f"{count:.3g}")
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            digits = 2 - int(math.log10(count / size))
            return f"{count / size:.{max(digits, 0)}f}{unit}"
    return f"{count:.0f}"


def _spread(points: Sequence[Point]) -> float:
    """Standard deviation of (log N, log D) across their principal axis."""
    pairs = [(math.log(point.parameters), math.log(point.tokens)) for point in points]
    n, d = zip(*pairs, strict=True)
    xx, yy = pvariance(n), pvariance(d)
    xy = covariance(n, d) * (len(n) - 1) / len(n)
    # The smaller eigenvalue of the covariance of two variables.
    return math.sqrt(max(0.0, (xx + yy) / 2 - math.hypot((xx - yy) / 2, xy)))
