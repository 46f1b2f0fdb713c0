"""Predicted against published step times: fit the rates, report errors, write docs/predictions.md.

    python -m tests.bench.predictions            print the constants of training/cost/step_time.py
    python -m tests.bench.predictions --write    write docs/predictions.md

Every row is predicted by rates fitted without its source; rows that were not tuned are not fitted.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from pipeline.accelerators import TPUS, Chip
from tests.bench.published_rows import Row, read
from training.cost.step_time import RANGES, Rates, size_class, times
from training.cost.step_work import Work, work

CHIPS = ("v4", "v5e", "v5p", "v6e", "v7x", "a100", "h100")
PRIOR = {
    # Name: (expected, relative standard deviation). Attention on TPUs from kernel timings on v6e
    # (openxla/tokamax, 0.5e12 scores a second); all others are wide.
    "matmul_tpu": (0.75, 0.3),
    "matmul_gpu": (0.7, 0.3),
    "scores_tpu": (7.2, 0.15),
    "scores_gpu": (8.0, 0.3),
    "streams_tpu": (1.0, 0.3),
    "streams_gpu": (1.0, 0.3),
    "logits_tpu": (27.0, 0.5),  # a logit is a score, forward and backward: 8.2 x (1 + 2.3)
    "exposed": (0.1, 0.8),
    "fixed": (0.01, 0.8),
    "doubling_tpu": (0.003, 1.0),
    # Chips against their family: the power limit of the H100 lowers its share of the peak.
    **{f"chip_{name}": (1.0, 0.15) for name in CHIPS if name in TPUS},
    "chip_a100": (1.185, 0.15),
    "chip_h100": (0.887, 0.15),
}
NOISE = 0.12  # relative, of a published time
ENOUGH = 20  # rows of a class that has a range of its own
FIELDS = [field.name for field in dataclasses.fields(Work)]


class Rows:
    """Rows as arrays, a block for each chip."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        works = [work(row.job, row.chip) for row in rows]
        self.measured = np.array([row.job.tokens / row.measured for row in rows])
        self.sources = np.array([row.source for row in rows])
        self.tuned = np.array([row.tuned for row in rows])
        self.classes = [size_class(row.job.model.parameter_count, row.job.chips) for row in rows]
        self.blocks: list[tuple[Chip, np.ndarray, Any]] = []
        names = np.array([row.chip.name for row in rows])
        for name in CHIPS:
            places = np.flatnonzero(names == name)
            if places.size:
                arrays = {f: np.array([getattr(works[i], f) for i in places]) for f in FIELDS}
                self.blocks.append((rows[places[0]].chip, places, Work(**arrays)))
        kinds = [(row.source, row.chip.name not in TPUS and row.chip.name) for row in rows]
        counts = Counter(kinds)
        # A source with many rows of one kind counts for less than as many sources.
        self.weights = np.array([counts[kind] ** -0.25 for kind in kinds])

    def predict(self, numbers: dict[str, float]) -> np.ndarray:
        """Seconds of a step, row by row."""
        found = np.zeros(len(self.rows))
        for chip, places, counted in self.blocks:
            found[places] = sum(times(counted, chip, rates(numbers, chip)).values())
        return found


def rates(numbers: dict[str, float], chip: Chip) -> Rates:
    """The rates of a chip, from fitted numbers by name."""
    family = "tpu" if chip.name in TPUS else "gpu"
    return Rates(
        matmul=numbers[f"matmul_{family}"] * numbers[f"chip_{chip.name}"],
        scores=numbers[f"scores_{family}"],
        streams=numbers[f"streams_{family}"],
        logits=numbers.get(f"logits_{family}", 0.0),
        exposed=numbers["exposed"],
        fixed=numbers["fixed"],
        doubling=numbers.get(f"doubling_{family}", 0.0),
    )


def fit(rows: Rows, chosen: np.ndarray) -> dict[str, float]:
    """The numbers that the chosen rows agree with best, near those of `PRIOR`."""
    expected = np.log([value for value, _ in PRIOR.values()])
    spread = np.array([deviation for _, deviation in PRIOR.values()])

    def numbers(logs: np.ndarray) -> dict[str, float]:
        return dict(zip(PRIOR, np.exp(logs).tolist(), strict=True))

    def residuals(logs: np.ndarray) -> np.ndarray:
        errors = np.log(rows.predict(numbers(logs)) / rows.measured)
        return np.concatenate([(errors * rows.weights)[chosen] / NOISE, (logs - expected) / spread])

    return numbers(least_squares(residuals, expected, loss="soft_l1").x)


def leave_one_source_out(rows: Rows) -> np.ndarray:
    """Predicted seconds of each row, by rates fitted without its source."""
    found = np.zeros(len(rows.rows))
    for source in sorted(set(rows.sources)):
        own = rows.sources == source
        found[own] = rows.predict(fit(rows, rows.tuned & ~own))[own]
    return found


def in_class(rows: Rows, name: tuple[str, str]) -> np.ndarray:
    """Which rows have this `size_class`."""
    return np.array([each == name for each in rows.classes])


def ranges(
    rows: Rows, ratio: np.ndarray, chosen: np.ndarray
) -> dict[tuple[str, str], tuple[float, float]]:
    """`step_time.RANGES` from the chosen rows' published / predicted times, untuned runs too.

    The ends are those rows of the class below and above which lies a tenth of it at most, rounded
    outward to hundredths, so at least 80 % lie between them. With fewer than `ENOUGH` rows they are
    at least as far apart as those of all rows.
    """
    pooled, found = _ends(ratio[chosen]), {}
    for name in RANGES:
        own = ratio[chosen & in_class(rows, name)]
        low, high = _ends(own) if own.size else pooled
        few = own.size < ENOUGH
        found[name] = (min(low, pooled[0]), max(high, pooled[1])) if few else (low, high)
    return found


def _ends(ratio: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(ratio, 0.1, method="lower"), np.quantile(ratio, 0.9, method="higher")
    return math.floor(100 * low) / 100, math.ceil(100 * high) / 100


def inside(
    rows: Rows, ratio: np.ndarray, limits: dict[tuple[str, str], tuple[float, float]]
) -> np.ndarray:
    """Whether each row's published time lies in the range of its class."""
    low, high = np.array([limits[name] for name in rows.classes]).T
    return (low <= ratio) & (ratio <= high)


def inside_others(rows: Rows, ratio: np.ndarray) -> np.ndarray:
    """The same with ranges from the other sources alone."""
    found = np.zeros(len(ratio), bool)
    for source in sorted(set(rows.sources)):
        own = rows.sources == source
        found[own] = inside(rows, ratio, ranges(rows, ratio, ~own))[own]
    return found


def summary(errors: np.ndarray) -> str:
    """Cells of a table: rows, median and 90th percentile of |error|, median error."""
    size = np.abs(errors)
    return (
        f"{errors.size} | {np.median(size):.1%} | {np.quantile(size, 0.9):.1%} | "
        f"{np.median(errors):+.1%}"
    )


def page() -> str:
    """docs/predictions.md."""
    published, left_out = read()
    rows = Rows(published)
    predicted = leave_one_source_out(rows)
    errors = predicted / rows.measured - 1
    head = [
        "# Predicted against published step times",
        "",
        "Made by `python -m tests.bench.predictions --write` from the published rows of",
        "`tests/bench/published/rows.csv`, each with its file or thread there.",
        "",
        "`ponente plan` predicts a step's seconds by `training/cost/step_time.py`, a roofline by",
        f"parts with {len(PRIOR)} fitted numbers. Here every row is predicted by numbers fitted",
        "without any row of its source; its form was chosen with all rows in sight. An",
        "error of +10% means predicted 10% slower. None of it was measured by this project, and",
        "[your own runs correct it](#what-your-own-runs-change);",
        "what one GPU took is in [On NVIDIA GPUs](gpus.md). No row has [our attention",
        "kernel](attention.md): there `plan` scales the time of scores by the ratio of scheduled",
        "cycles, which is the compiler's and was never measured.",
        "",
        "| rows | number | median of the error's size | 90th percentile | median error |",
        "|---|---|---|---|---|",
    ]
    groups = [("all", np.ones(len(errors), bool)), ("not tuned", ~rows.tuned)]
    groups += [(f"source {name}", rows.sources == name) for name in sorted(set(rows.sources))]
    column = {
        "hardware": [row.chip.name for row in published],
        "head size": [row.job.model.head_size for row in published],
        "embed": [_width(row.job.model.embed) for row in published],
    }
    for title, values in column.items():
        groups += [(f"{title} {v}", np.array([x == v for x in values])) for v in _sorted(values)]
    table = [f"| {name} | {summary(errors[chosen])} |" for name, chosen in groups]
    from tests.bench.learned_rows import section  # which imports this module

    table += [*_classes(rows, predicted), *_pods(rows)]
    table += [*_first(rows, published, predicted), *section(rows)]
    rest = [f(published, predicted, errors) for f in (_worst, _rows)]
    return "\n".join([*head, *table, *rest[0], *rest[1], *_left_out(left_out)])


def _classes(rows: Rows, predicted: np.ndarray) -> list[str]:
    ratio, everything = rows.measured / predicted, np.ones(len(predicted), bool)
    limits = ranges(rows, ratio, everything)
    among, others = inside(rows, ratio, limits), inside_others(rows, ratio)
    lines = [
        *("", "## By size and chips", ""),
        *paragraph(
            "The range is what `plan` prints: the 10th and 90th percentile of published over "
            "predicted time, tuned or not, each rounded outward to a row, so at least 80 % of a "
            f"class lie inside. A class of fewer than {ENOUGH} rows is at least as wide as all "
            "rows together; one without rows is as wide. In the last column the range too is from "
            "the other sources alone. That is stricter: without llm-foundry, few large runs remain."
        ),
        "",
        "| parameters | chips | rows | median of the error's size | 90th percentile | median error "
        "| range, of the predicted time | inside | inside, range of other sources |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (low, high) in [*limits.items(), (("all", "all"), (0.0, 0.0))]:
        chosen = everything if name[0] == "all" else in_class(rows, name)
        cells = [*name, "0", "-", "-", "-"]
        if chosen.any():
            cells[2:] = [summary(predicted[chosen] / rows.measured[chosen] - 1)]
        cells.append("by class" if high == 0.0 else f"{low:.2f} to {high:.2f}")
        cells += [
            f"{found[chosen].mean():.0%}" if chosen.any() else "-" for found in (among, others)
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


EXAMPLE = "Llama 130M on 16 v5p"


def _pods(rows: Rows) -> list[str]:
    """What the terms of the loss and of the number of chips say of a small model on a pod."""
    row = next(row for row in rows.rows if row.label == EXAMPLE)
    numbers = fit(rows, rows.tuned)
    own = rates(numbers, row.chip)
    counted = work(row.job, row.chip)
    seconds = sum(times(counted, row.chip, own).values())
    nothing = dataclasses.replace(counted, logits=0.0)
    loss = seconds - sum(times(nothing, row.chip, own).values())
    chips = own.fixed + own.doubling * counted.doublings
    at = [1e3 * (own.fixed + own.doubling * doublings) for doublings in (0, 4, 8)]
    return [
        *("", "## Small models on pods", ""),
        *paragraph("Two terms hardly show in a long step and are half of a small model's:"),
        "",
        *paragraph(
            f"- The loss. On a TPU a logit takes as long as {own.logits / own.scores:.1f} scores "
            "of attention's forward pass; the vector unit computes both. There are positions x "
            "vocabulary of them, whatever the width. Most rows behind this keep all logits in "
            "float32 (Levanter, axlearn); ponente computes as many in chunks, and no run of it on "
            "a pod has been timed."
        ),
        *paragraph(
            f"- A time that does not depend on the work: {at[0]:.0f} ms of every step on one chip, "
            f"{at[1]:.0f} on 16 TPUs, {at[2]:.0f} on 256. Each doubling adds "
            f"{1e3 * own.doubling:.0f} ms, for which the chips wait for one another. Of GPUs no "
            "row tells it apart: the only small model on more than eight was not tuned."
        ),
        "",
        *paragraph(
            f"{EXAMPLE}, with {row.job.tokens:,.0f} tokens a chip and a vocabulary of "
            f"{row.job.model.vocab_size:,}: of {seconds:.2f} s, {loss / seconds:.0%} are the loss "
            f"without its matmul and {chips / seconds:.0%} the time that does not depend on the "
            "work. A small model on a pod gains more from a larger batch, a smaller vocabulary or "
            "fewer chips than from faster matmuls."
        ),
    ]


FIRST = (0.008, 0.214, 0.044)  # by the rates of 2026-11-26, from 152 rows, none of v7x


def _first(rows: Rows, published: list[Row], predicted: np.ndarray) -> list[str]:
    fitted = rows.predict(fit(rows, rows.tuned)) / rows.measured - 1
    own = [i for i, row in enumerate(published) if row.chip.name == "v7x"]
    lines = [
        *("", "## A new chip's first prediction", ""),
        "v7x's rows were predicted before any entered the fit, by the rates of other chips.",
        "",
        "| row | length | first | after the fit | source left out |",
        "|---|---|---|---|---|",
    ]
    for i, first in zip(own, FIRST, strict=True):
        errors = (first, fitted[i], predicted[i] / rows.measured[i] - 1)
        what = f"{published[i].label} | {published[i].job.sequence_length:,}"
        lines.append(f"| {what} | {' | '.join(f'{error:+.1%}' for error in errors)} |")
    return lines


def paragraph(text: str) -> list[str]:
    """Lines of a paragraph or of an item."""
    text = " ".join(text.split())
    return textwrap.wrap(text, 88, subsequent_indent="  " if text.startswith("- ") else "")


def _width(embed: int) -> str:
    return "to 1,024" if embed <= 1024 else "1,025 to 4,096" if embed <= 4096 else "above 4,096"


def _sorted(values: list[Any]) -> list[Any]:
    return sorted(set(values), key=lambda value: (isinstance(value, str), value))


REASONS = {
    "tomat": "not tuned; FSDP multiplies slices 64 wide, a quarter of the matrix unit, and "
    "attention took 47 %",
    "H100 8x2": "not tuned; it took longer than 32 v5e, which have two fifths of the FLOP/s",
    "maxtest": "a diagnostic run without XLA flags",
    "nanochat": "a faster stack (FlashAttention 3) than that of most H100 rows of the fit",
    "Gala": "neither recomputation nor the kind of attention is published",
    "axlearn": "recomputation is not published and taken as half of the matmuls",
    "other": "this chip's share of its peak is higher here than in the sources that are left",
    "slower": "this chip's share of its peak is lower here than in the sources that are left",
}
"""Likely causes, from the notes of the rows and the parts of the predicted time."""


def _why(row: Row, error: float) -> str:
    for name in ("tomat", "H100 8x2", "maxtest", "nanochat", "Gala"):
        if name in f"{row.origin} {row.label}":
            return REASONS[name]
    return REASONS.get(row.source, REASONS["other" if error > 0 else "slower"])


def _worst(rows: list[Row], predicted: np.ndarray, errors: np.ndarray) -> list[str]:
    lines = ["", "## The worst ten", "", "With the likely cause.", ""]
    for i in np.argsort(-np.abs(errors))[:10]:
        row = rows[i]
        lines.append(
            f"- {row.label} ({row.source}), {row.job.sequence_length:,} tokens: predicted "
            f"{predicted[i]:.3g} s, published {predicted[i] / (1 + errors[i]):.3g} s "
            f"({errors[i]:+.0%}): {_why(row, errors[i])}."
        )
    return lines


def _rows(rows: list[Row], predicted: np.ndarray, errors: np.ndarray) -> list[str]:
    lines = [
        *("", "## Every row", ""),
        "| source | model and hardware | length | rows a chip | remat | published s | predicted s "
        "| error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for i, row in enumerate(rows):
        job = row.job
        lines.append(
            f"| {row.source} | {row.label} | {job.sequence_length} | {job.rows:g} | {job.remat} | "
            f"{predicted[i] / (1 + errors[i]):.3g} | {predicted[i]:.3g} | {errors[i]:+.0%} |"
        )
    return lines


def _left_out(left_out: list[tuple[str, str]]) -> list[str]:
    lines = ["", "## Not predicted", ""]
    for reason in sorted({reason for _, reason in left_out}):
        names = sorted({label for label, why in left_out if why == reason})
        lines.append(f"- {reason}: {'; '.join(names)}.")
    return [*lines, ""]


def constants() -> str:
    """What training/cost/step_time.py holds."""
    rows = Rows(read()[0])
    numbers = fit(rows, rows.tuned)
    ratio = rows.measured / leave_one_source_out(rows)
    errors = np.abs(1 / ratio - 1)
    lines = [f"{name} = {value:.4g}" for name, value in numbers.items()]
    limits = ranges(rows, ratio, np.ones(len(ratio), bool))
    lines += [f"{name}: ({low:.2f}, {high:.2f})," for name, (low, high) in limits.items()]
    lines.append(f"untuned: {', '.join(f'{x:.2f}' for x in np.sort(ratio[~rows.tuned]))}")
    lines.append(f"error {np.median(errors):.3f}, 90th percentile {np.quantile(errors, 0.9):.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    parsed = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parsed.add_argument("--write", action="store_true", help="write docs/predictions.md")
    if parsed.parse_args().write:
        (Path(__file__).parents[2] / "docs" / "predictions.md").write_text(page())
    else:
        print(constants())
