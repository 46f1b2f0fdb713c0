"""Metrics rows of training steps, their definitions, and the recorder that makes them.

A row describes one optimizer step:

    step                        optimizer steps done, this one included
    loss                        mean over the counted tokens, nats; NaN without one
    grad_norm, parameter_norm   2-norm over all arrays together; the gradient's before clipping
    learning_rate               learning rate of this step
    tokens                      useful tokens: predictions that count in the loss
    padded                      padding: the other predictions, out of batch x (length - 1)
    skipped                     steps so far that were not applied: not finite, a loss spike, or
                                without a counted token
    seconds                     from the end of the step before to the end of this one, including
                                the wait for data, excluding compilation, evaluation, checkpoints
                                and samples
    data_wait                   the part of `seconds` in which the devices were idle because a batch
                                was not ready: mostly the next step's, because the loop waits for it
                                before it reads the numbers of this one
    tokens_per_second           positions of the batch (batch x length, padding included) per second
    tokens_per_second_average   the same over the last 50 steps: sum of positions / sum of seconds
    useful_tokens_per_second    `tokens` per second
    mfu, mfu_full               model FLOPs of all positions per second / peak of all devices. Model
                                FLOPs are three times the forward pass, without recomputation, with
                                the output head and without the embedding's gather. `mfu` counts
                                attention over the pairs that a causal mask (and a window) lets
                                through, `mfu_full` over all pairs (see `models.shape.footprint`)
    hfu                         executed FLOPs per second / the same peak: matmuls and attention
                                kernels, including what the backward pass recomputes (see
                                `training.cost.executed_flops`)
    memory_bytes                peak bytes in use on this process's fullest device, or the process's
                                peak resident set where devices report none (CPUs); read at most
                                once a second

A row has the three utilisations when the peak is known. The peak is the dense bfloat16 one, also
for a run in float32. Other columns of the step are passed through.
"""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from models.shape.config import TransformerConfig
from models.shape.footprint import training_flops_per_token
from pipeline.accelerators import peak_flops
from pipeline.errors import InputError
from training.config.job import MetricsRow
from training.metrics.stopwatch import Stopwatch

MEMORY_SECONDS = 1.0


@dataclass(frozen=True)
class Throughput:
    """Converts seconds per step into rates and utilisations.

    Attributes:
        tokens, rows: positions and sequences per global batch.
        flops: training FLOPs per token with (causal, full) attention.
        peak: dense bfloat16 FLOP/s of all devices together; None when not known.
        executed: FLOPs of a step over all devices; None when not counted.
    """

    tokens: int
    flops: tuple[float, float]
    peak: float | None
    rows: int = 0
    executed: float | None = None

    @staticmethod
    def of(
        model: TransformerConfig, batch_size: int, sequence_length: int, kind: str, devices: int
    ) -> Throughput:
        one = peak_flops(kind)
        causal, full = (
            training_flops_per_token(model, sequence_length, causal=causal)
            for causal in (True, False)
        )
        return Throughput(
            tokens=batch_size * sequence_length,
            flops=(causal, full),
            peak=None if one is None else one * devices,
            rows=batch_size,
        )

    def row(self, seconds: float) -> MetricsRow:
        """tokens_per_second and, when the peak is known, mfu, mfu_full and (if counted) hfu."""
        seconds = max(seconds, 1e-9)
        rate = self.tokens / seconds
        row = {"tokens_per_second": rate}
        if self.peak is not None:
            causal, full = self.flops
            row |= {"mfu": rate * causal / self.peak, "mfu_full": rate * full / self.peak}
            if self.executed is not None:
                row["hfu"] = self.executed / seconds / self.peak
        return row

    def padded(self, useful: float) -> float:
        """Predictions of a batch that did not count; N tokens of a row make N - 1 predictions."""
        return max(0.0, self.tokens - self.rows - useful)


class PeakMemory:
    """A call returns `memory_bytes` of a row, which it reads at most once a second."""

    def __init__(
        self, devices: Sequence[jax.Device], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.devices, self.clock = devices, clock
        self._asked, self._bytes = -math.inf, 0

    def __call__(self) -> int:
        now = self.clock()
        if now - self._asked >= MEMORY_SECONDS:
            self._asked, self._bytes = now, _peak_bytes(self.devices)
        return self._bytes


def _peak_bytes(devices: Sequence[jax.Device]) -> int:
    try:
        stats = [device.memory_stats() for device in devices]
    except Exception:  # noqa: BLE001 - runtimes without statistics raise various exceptions
        stats = []
    if peaks := [one["peak_bytes_in_use"] for one in stats if one and "peak_bytes_in_use" in one]:
        return max(peaks)
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


AVERAGED_STEPS = 50


class Updates(NamedTuple):
    """What the steps so far did to the model; a checkpoint stores it, as a list.

    `skipped` is as in the column, `in_a_row` the last steps that had counted tokens and were not
    applied, `applied` those of this run alone.
    """

    skipped: float = 0.0
    in_a_row: int = 0
    applied: int = 0


NO_UPDATES = Updates()


class Recorder:
    """Makes one metrics row per step, a step late.

    Reading a metric blocks until the device has computed it. Those of the step before the newest
    are (nearly) computed, so the device always has the next step queued. A row's `seconds` and
    `data_wait` are what the buckets "step" and "data_wait" of the stopwatch have gained since the
    row before, so time in any other bucket belongs to no row.

    `throughput` is of the coming steps, applied from the next `push`; None before the first batch
    phase. `updates` are those up to the last row; a resumed attempt continues the series. `memory`
    gives `memory_bytes`, or None.
    """

    def __init__(
        self,
        on_row: Callable[[MetricsRow], None],
        watch: Stopwatch,
        throughput: Throughput | None,
        max_skipped: int,
        *,
        updates: Updates = NO_UPDATES,
        memory: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.throughput, self.updates = throughput, updates
        self._on_row, self._watch, self._memory = on_row, watch, memory
        self._max_skipped = max_skipped
        self._pending: tuple[int, dict[str, jax.Array], Throughput] | None = None
        self._recent: deque[tuple[int, float]] = deque(maxlen=AVERAGED_STEPS)
        self._spent = watch.nanoseconds()

    def push(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Write the row of the step before, and of this one if its `metrics` are computed already.

        Raises `InputError` where the last `max_skipped` steps were not applied.
        """
        self.drain()
        assert self.throughput is not None, "steps run in a batch phase"
        self._pending = (step, metrics, self.throughput)
        arrays: Any = metrics.values()  # jax.Array's annotations lack `is_ready`
        if all(array.is_ready() for array in arrays):
            self.drain()

    def drain(self) -> None:
        """Wait for the newest step and write its row, unless it is written."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._write(*pending)

    def _write(self, step: int, metrics: dict[str, jax.Array], throughput: Throughput) -> None:
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        before, self._spent = self._spent, self._watch.nanoseconds()
        training, data_wait = (
            (self._spent[bucket] - before[bucket]) / 1e9 for bucket in ("step", "data_wait")
        )
        seconds = training + data_wait
        if values["skipped"] > self.updates.skipped:
            spent = self._spent["step"] - before["step"]
            self._watch.move("step", "skipped", spent)
            self._spent["step"] -= spent
        if values.get("tokens") == 0:
            values["loss"] = math.nan
        row = {"step": step, **values, "seconds": seconds, "data_wait": data_wait}
        row |= throughput.row(seconds)
        self._recent.append((throughput.tokens, seconds))
        tokens = sum(tokens for tokens, _ in self._recent)
        spent = sum(seconds for _, seconds in self._recent)
        row["tokens_per_second_average"] = tokens / max(spent, 1e-9)
        if "tokens" in values:
            row["padded"] = throughput.padded(values["tokens"])
            row["useful_tokens_per_second"] = values["tokens"] / max(seconds, 1e-9)
        if (memory := self._memory()) is not None:
            row["memory_bytes"] = memory
        self._on_row(row)
        self._count(step, values)

    def _count(self, step: int, values: MetricsRow) -> None:
        skipped, in_a_row, applied = self.updates
        if values["skipped"] == skipped:
            in_a_row, applied = 0, applied + 1
        elif values.get("tokens") != 0:  # a batch of masked tokens is no sign of divergence
            in_a_row += 1
        self.updates = Updates(values["skipped"], in_a_row, applied)
        if in_a_row >= self._max_skipped:
            raise InputError(
                f"step {step}: loss or gradients were not finite, or the loss was a spike, in "
                f"{in_a_row} steps in a row, none was applied; lower the learning "
                "rate or lengthen warmup, or inspect this part of the data"
            )
