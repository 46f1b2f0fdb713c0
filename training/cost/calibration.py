"""The fitted numbers of `training.cost.step_time`, and how far they are from published runs.

Fitted by `python -m tests.bench.predictions` to 128 published rows of 9 sources;
docs/predictions.md has every row with its error.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.accelerators import TPUS, Chip
from training.cost.step_time import Rates


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Numbers of one fit.

    Attributes:
        date: of the fit.
        rows, sources: that were fitted.
        error: median of the relative error's size, where a row's source was left out of the fit.
        error_90: its 90th percentile.
        fast, slow: 10th and 90th percentile of published over predicted time, of tuned runs.
        untuned: published over predicted time of the two untuned runs.
    """

    date: str = "2026-11-23"
    rows: int = 128
    sources: int = 9
    error: float = 0.116
    error_90: float = 0.287
    fast: float = 0.796
    slow: float = 1.178
    untuned: tuple[float, float] = (2.1, 2.6)


CALIBRATION = Calibration()
MATMUL = {"v4": 0.724, "v5e": 0.779, "v5p": 0.718, "v6e": 0.717, "a100": 0.654, "h100": 0.503}
"""Share of the peak in large matmuls. An H200 has the H100's multiprocessors."""
_SAME = {"h200": "h100"}
_FAMILY = 0.572  # GPUs without rows


def rates(chip: Chip) -> Rates:
    """The fitted numbers for a chip; those of its family where no row is of it."""
    tpu = chip.name in TPUS
    return Rates(
        matmul=MATMUL.get(_SAME.get(chip.name, chip.name), _FAMILY),
        scores=8.26 if tpu else 10.8,
        streams=0.979 if tpu else 1.032,
        exposed=0.126,
        fixed=0.0131,
    )
