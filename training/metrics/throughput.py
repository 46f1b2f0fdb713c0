"""Rates, utilisations and peak memory of a metrics row."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.shape.config import TransformerConfig
from models.shape.flops import training_flops_per_token
from pipeline.accelerators import peak_flops
from training.config.job import MetricsRow

if TYPE_CHECKING:
    import jax

MEMORY_SECONDS = 1.0


@dataclass(frozen=True)
class Throughput:
    """Converts seconds per step into rates and utilisations.

    Attributes:
        tokens, rows: positions and sequences per global batch.
        flops: training FLOPs per token with (causal, full) attention.
        peak: dense bfloat16 FLOP/s of all devices together; None when not known.
        executed: FLOPs that all devices together execute in a step; None when not counted.
    """

    tokens: int
    flops: tuple[float, float]
    peak: float | None
    rows: int = 0
    executed: float | None = None

    @staticmethod
    def of(
        model: TransformerConfig,
        batch_size: int,
        sequence_length: int,
        kind: str,
        devices: int,
    ) -> Throughput:
        """Rates of one batch phase on so many devices of JAX's device kind `kind`."""
        one = peak_flops(kind)
        return Throughput(
            tokens=batch_size * sequence_length,
            flops=(
                training_flops_per_token(model, sequence_length, causal=True),
                training_flops_per_token(model, sequence_length, causal=False),
            ),
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


@dataclass
class PeakMemory:
    """A call returns `memory_bytes` of a row, which it reads at most once a second."""

    devices: Sequence[jax.Device]
    clock: Callable[[], float] = time.monotonic
    _asked: float = dataclasses.field(default=float("-inf"), init=False)
    _bytes: int | None = dataclasses.field(default=None, init=False)

    def __call__(self) -> int | None:
        now = self.clock()
        if now - self._asked >= MEMORY_SECONDS:
            self._asked, self._bytes = now, _peak_bytes(self.devices)
        return self._bytes


def _peak_bytes(devices: Sequence[jax.Device]) -> int | None:
    try:
        stats = [device.memory_stats() for device in devices]
    except Exception:  # noqa: BLE001 - runtimes without statistics raise various exceptions
        stats = []
    peaks = [one["peak_bytes_in_use"] for one in stats if one and "peak_bytes_in_use" in one]
    return max(peaks, default=None) if peaks else _peak_resident()


def _peak_resident() -> int | None:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
