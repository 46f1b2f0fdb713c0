"""The fitted parameters of `training.cost.step_time`, and their errors for published runs.

Fitted on 2026-11-23 by `python -m tests.bench.predictions` to 128 published rows of 9 sources;
docs/predictions.md has every row with its error.
"""

from __future__ import annotations

from pipeline.accelerators import TPUS, Chip
from training.cost.step_time import Rates

ROWS = 128
ERROR, ERROR_90 = 0.116, 0.287
"""Median and 90th percentile of the absolute relative error, with each row's source left out of the
fit."""
FAST, SLOW = 0.796, 1.178
"""10th and 90th percentile of published / predicted time of tuned runs."""
UNTUNED = (2.1, 2.6)
"""Published / predicted time of the two untuned runs."""
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
