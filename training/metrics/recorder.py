"""Rows of a run's steps, their definitions, and the recorder that reads them a step late.

Reading a metric waits for the device. The recorder keeps the device arrays of the newest step and
reads those of the step before, which have (nearly) been computed, so the device always has the next
step queued while the host looks at numbers.

A row is about one optimizer step:

    step                        optimizer steps done, this one included
    loss                        mean over the counted tokens, nats
    grad_norm, parameter_norm   2-norms over everything; the gradient's before clipping
    learning_rate               of this step
    tokens                      useful tokens: predictions that count in the loss
    padded                      predictions that do not count, of batch x (length - 1): padding
    skipped                     steps so far that were not applied because they were not finite
    seconds                     from the end of the step before to the end of this one, the wait
                                for data included; compilation, evaluation, checkpoints and samples
                                are not
    data_wait                   of these, seconds in which the devices had nothing to do because a
                                batch was not there: mostly the next step's, which is waited for
                                before the numbers of this one are read
    tokens_per_second           positions of the batch (batch x length, padding among them) a second
    tokens_per_second_average   the same over the last 50 steps together: positions over seconds
    useful_tokens_per_second    `tokens` a second
    mfu, mfu_full               model FLOPs of all positions a second over the devices' peak: the
                                forward pass three times, nothing recomputed, the output head in and
                                the embedding's gather out. `mfu` counts attention over what a
                                causal mask (and a window) lets through, `mfu_full` over the square
                                (see `models.flops`)
    hfu                         FLOPs that the program executes a second over the same peak: matrix
                                matmuls and attention kernels as they are traced, with what the
                                backward pass computes again (see `training.cost.executed_flops`)
    memory_bytes                peak bytes in use on this process's fullest device; where devices
                                do not say (CPUs) the process's peak resident set. Asked once a
                                second at most

The three utilisations are there when the peak is known. It is the dense bfloat16 one, also for a
run in float32. More columns of the step's own are passed through.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax

from pipeline.errors import InputError
from training.config.job import MetricsRow
from training.metrics.throughput import Throughput

AVERAGED_STEPS = 50

_Pending = tuple[int, dict[str, jax.Array], float, Throughput]


class Recorder:
    """Makes one row per step.

    Args:
        on_row: called with every row.
        throughput: of the steps to come; None where there will be none.
        max_skipped: non-finite steps in a row after which `push` raises.
        skipped: `skipped` of the recorder before.
        memory: bytes for the column of that name, None for no such column.

    Attributes:
        throughput: set it anew when batches change; it counts from the next `push` on.
        skipped: the `skipped` column of the last row, and how many steps in a row were skipped up
            to there; an interruption ends no such series.
    """

    def __init__(
        self,
        on_row: Callable[[MetricsRow], None],
        throughput: Throughput | None,
        max_skipped: int,
        *,
        skipped: tuple[float, int] = (0.0, 0),
        clock: Callable[[], float] = time.perf_counter,
        memory: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.throughput = throughput or Throughput(tokens=0, flops=(0.0, 0.0), peak=None)
        self._max_skipped = max_skipped
        self._on_row = on_row
        self._clock = clock
        self._memory = memory
        self._pending: _Pending | None = None
        self._recent: deque[tuple[int, float]] = deque(maxlen=AVERAGED_STEPS)
        self.skipped = skipped
        self.restart_clock()

    def restart_clock(self) -> None:
        """Time from here on belongs to the next row; what lies before belongs to none."""
        self._last = self._clock()

    def push(self, step: int, metrics: dict[str, jax.Array], data_wait: float) -> None:
        """Keep the arrays of `step` and write the row of the step before, or both if it is over.

        Args:
            step: the one that was just queued, or on CPUs computed.
            metrics: its device arrays.
            data_wait: seconds waited for a batch since the last `push` or `drain`.

        Raises:
            InputError: too many steps in a row were not finite.
        """
        before = self._take(data_wait)
        # The clock has run for the step before until now, and only without one for this step.
        own = data_wait if before is None else 0.0
        self._pending = (step, metrics, own, self.throughput)
        if before is not None:
            self._write(*before)
        arrays: Any = metrics.values()  # jax.Array's annotations lack `is_ready`
        if all(array.is_ready() for array in arrays):
            self.drain()

    def drain(self, data_wait: float = 0.0) -> None:
        """Wait for the newest step and write its row; `data_wait` as for `push`."""
        before = self._take(data_wait)
        if before is not None:
            self._write(*before)

    def _take(self, data_wait: float) -> _Pending | None:
        before, self._pending = self._pending, None
        if before is None:
            return None
        step, metrics, waited, throughput = before
        return step, metrics, waited + data_wait, throughput

    def _write(
        self, step: int, metrics: dict[str, jax.Array], data_wait: float, throughput: Throughput
    ) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = self._clock()
        seconds, self._last = now - self._last, now
        row = {"step": step, **values, "seconds": seconds, "data_wait": data_wait}
        row |= throughput.row(seconds)
        self._recent.append((throughput.tokens, seconds))
        row["tokens_per_second_average"] = _rate(self._recent)
        if "tokens" in values:
            row["padded"] = throughput.padded(values["tokens"])
            row["useful_tokens_per_second"] = values["tokens"] / max(seconds, 1e-9)
        memory = self._memory()
        if memory is not None:
            row["memory_bytes"] = memory
        self._on_row(row)
        self._check_finite(step, values["skipped"])

    def _check_finite(self, step: int, skipped: float) -> None:
        before, in_a_row = self.skipped
        in_a_row = in_a_row + 1 if skipped > before else 0
        self.skipped = (skipped, in_a_row)
        if in_a_row >= self._max_skipped:
            raise InputError(
                f"step {step}: loss or gradients were not finite, or the loss was a spike, in "
                f"{in_a_row} steps in a row, none was applied; lower the learning "
                "rate or lengthen warmup, or look at this part of the data"
            )


def _rate(recent: deque[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in recent) / max(sum(seconds for _, seconds in recent), 1e-9)
