"""Rows of the metric history, and the recorder that reads them one step late.

Reading a metric waits for the device. The recorder keeps the device arrays of the newest step and
reads those of the step before, which have (nearly) been computed, so the device always has the next
step queued while the host looks at numbers.

A row has: step (optimizer steps done), loss (nats per counted token), grad_norm, parameter_norm,
learning_rate, tokens (counted in the loss), skipped (so far), seconds (from the end of the step
before to the end of this one; compilation, evaluation and checkpoints excluded), tokens_per_second
(all positions of the batch), data_wait (seconds spent waiting for the loader since the row before)
and, when the device's peak is known, mfu (causal attention counted exactly) and mfu_full (attention
counted as if every position saw all others). Both count forward and backward once, without
recomputation, with the output head and without the embedding's gather.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax

from models.config import TransformerConfig
from models.flops import peak_flops, training_flops_per_token
from pipeline.errors import InputError
from training.job import Row


@dataclass(frozen=True)
class Throughput:
    """Turns seconds per step into tokens per second and MFU.

    Attributes:
        tokens: positions per global batch.
        flops: training FLOPs per token, causal and full attention.
        peak: dense bfloat16 FLOP/s of all devices together; None when not known.
    """

    tokens: int
    flops: tuple[float, float]
    peak: float | None

    @staticmethod
    def of(
        model: TransformerConfig, batch_size: int, sequence_length: int, kind: str, devices: int
    ) -> Throughput:
        """For `devices` devices of JAX's device kind `kind`."""
        one = peak_flops(kind)
        return Throughput(
            tokens=batch_size * sequence_length,
            flops=(
                training_flops_per_token(model, sequence_length, causal=True),
                training_flops_per_token(model, sequence_length, causal=False),
            ),
            peak=None if one is None else one * devices,
        )

    def row(self, seconds: float) -> Row:
        """tokens_per_second, and mfu and mfu_full when the peak is known."""
        rate = self.tokens / max(seconds, 1e-9)
        row = {"tokens_per_second": rate}
        if self.peak is not None:
            causal, full = self.flops
            row |= {"mfu": rate * causal / self.peak, "mfu_full": rate * full / self.peak}
        return row


class Recorder:
    """Appends one row per step to `rows`.

    Args:
        rows: history so far; appended to.
        throughput: of this run.
        max_skipped: non-finite steps in a row after which `push` raises.
        on_row: called with every new row.
    """

    def __init__(
        self,
        rows: list[Row],
        throughput: Throughput,
        max_skipped: int,
        on_row: Callable[[Row], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rows = rows
        self.throughput = throughput
        self._max_skipped = max_skipped
        self._on_row = on_row
        self._clock = clock
        self._pending: tuple[int, dict[str, jax.Array], float] | None = None
        self._skipped_before = rows[-1]["skipped"] if rows else 0.0
        self._skipped_in_a_row = 0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Time from here on belongs to the next row; what lies before belongs to none."""
        self._last = self._clock()

    def push(self, step: int, metrics: dict[str, jax.Array], data_wait: float) -> None:
        """Keep the arrays of `step`; write the row of the step before.

        Raises:
            InputError: too many steps in a row were not finite.
        """
        before, self._pending = self._pending, (step, metrics, data_wait)
        if before is not None:
            self._write(*before)

    def drain(self) -> None:
        """Wait for the newest step and write its row."""
        before, self._pending = self._pending, None
        if before is not None:
            self._write(*before)

    def _write(self, step: int, metrics: dict[str, jax.Array], data_wait: float) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = self._clock()
        seconds, self._last = now - self._last, now
        row = {"step": step, **values, "seconds": seconds, "data_wait": data_wait}
        row |= self.throughput.row(seconds)
        self._rows.append(row)
        if self._on_row is not None:
            self._on_row(row)
        self._check_finite(step, values["skipped"])

    def _check_finite(self, step: int, skipped: float) -> None:
        was_skipped = skipped > self._skipped_before
        self._skipped_before = skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if was_skipped else 0
        if self._skipped_in_a_row >= self._max_skipped:
            raise InputError(
                f"step {step}: loss or gradients were not finite, or the loss was a spike, in "
                f"{self._skipped_in_a_row} steps in a row, none was applied; lower the learning "
                "rate or lengthen warmup, or look at this part of the data"
            )
