"""The fitted parameters of `training.cost.step_time`, and their errors for published runs.

Fitted by `python -m tests.bench.predictions` to 128 published rows of 9 sources;
docs/predictions.md has every row with its error.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.accelerators import TPUS, Chip
from training.cost.step_time import Rates


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Statistics of one fit.

    Attributes:
        date: date of the fit.
        rows, sources: numbers of published rows and sources in the fit.
        error: median absolute relative error, with each row's source left out of the fit.
        error_90: 90th percentile of the same error.
        fast, slow: 10th and 90th percentile of published / predicted time of tuned runs.
        untuned: published / predicted time of the two untuned runs.
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
"""Share of the peak that large matmuls reach, by chip."""
_SAME = {"h200": "h100"}  # the same multiprocessors
_FAMILY = 0.572  # GPUs without published rows


def rates(chip: Chip) -> Rates:
    """The fitted parameters for a chip, or for its family where no published row has the chip."""
    tpu = chip.name in TPUS
    return Rates(
        matmul=MATMUL.get(_SAME.get(chip.name, chip.name), _FAMILY),
        scores=8.26 if tpu else 10.8,
        streams=0.979 if tpu else 1.032,
        exposed=0.126,
        fixed=0.0131,
    )
