"""Published losses by compute, and the power law through them.

Bits per byte are exp(a - b log C) of C FLOPs, by least squares of logarithms. The interval is that
of a prediction: Student's t times the scatter of the runs around the line, wider where C is far
from theirs. It holds for the curve's own recipe, data and tokenizer, and knows no other error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

T_80 = 0.8 / math.sqrt(2 * 0.9 * 0.1)
"""0.9 quantile of Student's t with 2 degrees of freedom: four runs less two coefficients."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Four runs as (FLOPs, bits per byte), by rising FLOPs; `data` says what the losses are of."""

    data: str
    nats: float  # per token, in one bit per byte
    runs: tuple[tuple[float, float], ...]

    def loss(self, flops: float) -> tuple[float, float, float]:
        """Bits per byte of a compute-optimal run: low, middle and high of the 80 % interval."""
        mean, level, slope, spread, scatter = self._line()
        far = math.log(flops) - mean
        bits = math.exp(level + slope * far)
        wide = math.exp(T_80 * scatter * math.sqrt(1 + 1 / len(self.runs) + far**2 / spread))
        return bits / wide, bits, bits * wide

    def extrapolated(self, flops: float) -> bool:
        """Whether a run is smaller or larger than all of the curve's."""
        return not self.runs[0][0] <= flops <= self.runs[-1][0]

    def flops(self, bits: float) -> float:
        """The FLOPs for which `loss` forecasts these bits per byte."""
        mean, level, slope, _, _ = self._line()
        return math.exp(mean + (math.log(bits) - level) / slope)

    def _line(self) -> tuple[float, float, float, float, float]:
        """Means of log C and of log loss, slope, sum of squares of log C, scatter."""
        x, y = ([math.log(run[i]) for run in self.runs] for i in (0, 1))
        mean, level = math.fsum(x) / len(x), math.fsum(y) / len(y)
        x, y = [each - mean for each in x], [each - level for each in y]
        spread = math.fsum(each**2 for each in x)
        slope = math.fsum(a * b for a, b in zip(x, y, strict=True)) / spread
        left = math.fsum((b - slope * a) ** 2 for a, b in zip(x, y, strict=True))
        return mean, level, slope, spread, math.sqrt(left / (len(x) - 2))


NANOCHAT = Curve(
    data="FineWeb-edu in nanochat's tokenizer of 32,768 ids (4.65 bytes a token: "
    "leideng/nanochat-ascend); optima of dev/LOG.md, 2026-01-27, of a model with bigram tables",
    nats=4.65 * math.log(2),
    runs=((1e18, 0.8972), (2e18, 0.8616), (5e18, 0.8293), (1e19, 0.7999)),
)
MARIN = Curve(
    data="Paloma's c4_en after FineWeb-edu, in Llama 3's tokenizer (4.69 bytes a token); "
    "marin experiments/speedrun/muon_qwen3_scaling, 2025-09",
    nats=4.69 * math.log(2),
    runs=((1.777e18, 1.1663), (9.990e18, 1.0582), (4.210e19, 0.9888), (2.072e20, 0.9356)),
)
