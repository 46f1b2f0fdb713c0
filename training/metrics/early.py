"""Looks at a run's training loss before its end, against the intervals that its forecast gave."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from training.metrics.metrics_log import MetricsLog, read_history

Early = tuple[int, float, float]
"""A step, and the interval of the mean training loss in its `window`, nats per token."""


def window(step: int) -> range:
    """The steps whose losses are averaged after `step` steps: the last fifth of them."""
    return range(step + 1 - max(1, step // 5), step + 1)


class EarlyLooks:
    """The looks of a run's leader, by the rows of kind "forecast" of a run of `steps`."""

    def __init__(self, log: MetricsLog, rows: Iterable[Mapping[str, Any]], steps: int) -> None:
        self._log = log
        own = (row for row in rows if row["steps"] == steps)
        self._bounds = {step: ends for row in own for step, *ends in row.get("early", ())}

    def due(self, step: int) -> bool:
        return step in self._bounds

    def outside(self, step: int) -> dict[str, Any] | None:
        """The fields of the event where the loss up to `step` is outside; its row is written.

        Raises as the store does, which is no reason to end a training.
        """
        low, high = self._bounds[step]
        history = self._log.history  # before `flush`: lines that come meanwhile may not be stored
        self._log.flush()
        near = window(step)
        rows = (row for row in read_history(history, ["step"]) if row["step"] in near)
        losses = [row["loss"] for row in rows if math.isfinite(row["loss"])]
        loss = math.fsum(losses) / len(losses) if losses else low
        if low <= loss <= high:
            return None
        side = "above" if loss > high else "below"
        reason = (
            f"after {step:,} steps the training loss is {loss:.3f}, {side} the {low:.3f} to "
            f"{high:.3f} of runs that end as forecast; compare it with the runs of the forecast"
        )
        return {"step": step, "loss": loss, "low": low, "high": high, "reason": reason}
