"""Steps whose loss or gradient norm stood out from the steps before.

A step's rise is the logarithm of its value less the median of those of the `NEAR` steps before, so
that a falling loss has none. A step stands out if its rise is `LEAST` robust deviations or more
above the median rise of up to `WINDOW` steps before, of which there are `FEWEST` or more, or if its
value is not finite. A robust deviation is 1.4826 times the median absolute deviation (the standard
deviation of a normal distribution), and at least `FLOOR`. Later steps are not compared with those
that stood out, unless more than `NEAR` follow each other, which are a new level; of neighbouring
ones the first is kept, since those after it may only show what it did to the parameters.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

NEAR, WINDOW, FEWEST, LEAST, FLOOR = 8, 64, 16, 6.0, 0.01
COLUMNS = ("loss", "grad_norm")
RULE = (
    f"a rise above the median of the {NEAR} steps before that is {LEAST:g} robust deviations or "
    f"more above the usual rise of up to {WINDOW} steps before, or a value that is not finite"
)


@dataclass(frozen=True, kw_only=True)
class Spike:
    """The first step of a spike and the last, by the column that deviates most at the first.

    `median` is of the `NEAR` steps before, and `deviations` are robust, of the largest rise in it;
    infinite for a value that is not finite.
    """

    step: int
    last: int
    column: str
    value: float
    median: float
    deviations: float
    after: int = 0  # the step before it that stood out too, if that is the row before


def spikes(history: Sequence[Mapping[str, Any]], most: int) -> list[Spike]:
    """The largest spikes of a run, at most `most`, in the order of steps."""
    found: list[Spike] = []
    for spike in sorted(_each(history), key=lambda each: (each.step, -each.deviations)):
        before = found[-1] if found else None
        if before is None or (spike.step > before.last + 1 and spike.after != before.last):
            found.append(spike)
        else:
            away = max(before.deviations, spike.deviations)
            found[-1] = replace(before, last=spike.step, deviations=away)
    largest = sorted(found, key=lambda each: -each.deviations)[:most]
    return sorted(largest, key=lambda each: each.step)


def _each(history: Sequence[Mapping[str, Any]]) -> Iterable[Spike]:
    for column in COLUMNS:
        near, rises = deque[float](maxlen=NEAR), deque[float](maxlen=WINDOW)
        high, before = 0, 0  # judged values in a row that stood out, and the last row's step
        for row in history:
            value = float(row.get(column, 0.0))
            if value == 0.0:  # not measured, or of a batch without counted tokens
                continue
            level = math.log(value) if math.isfinite(value) and value > 0 else math.inf
            middle = statistics.median(near) if near else level
            rise = level - middle if math.isfinite(level) else math.inf
            away = _away(rise, rises)
            last, before = before, int(row["step"])
            high = high + 1 if away >= LEAST else 0
            if high and not (high > NEAR and math.isfinite(level)):  # else a new level
                yield Spike(
                    step=int(row["step"]),
                    last=int(row["step"]),
                    after=last if high > 1 else 0,
                    column=column,
                    value=value,
                    median=math.exp(middle) if math.isfinite(middle) else math.nan,
                    deviations=away,
                )
                continue
            if len(near) == NEAR:
                rises.append(rise)
            near.append(level)


def _away(rise: float, rises: Sequence[float]) -> float:
    """Robust deviations of a rise above the median of `rises`; 0 if these are too few."""
    if not math.isfinite(rise):
        return math.inf
    if len(rises) < FEWEST:
        return 0.0
    middle = statistics.median(rises)
    spread = 1.4826 * statistics.median(abs(each - middle) for each in rises)
    return (rise - middle) / max(FLOOR, spread)
