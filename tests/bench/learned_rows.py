"""What learning from a store's runs does to the published rows, for docs/predictions.md.

Each source's rows of one chip stand for the finished runs of a store: each row is predicted by
numbers fitted without its source, and corrected by other rows of its group.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from tests.bench.predictions import Rows, fit, paragraph, rates
from tests.bench.published_rows import Row
from training.cost.learned import CHIPS, Measurement, correction
from training.cost.step_time import RANGES, times
from training.cost.step_work import work

LEAST = 4
"""Rows of a group that stands for a store."""
RUNS = (0, 1, 2, 4, 8)
_DRAWS = 12
HOW = """A finished training records what was predicted beside what it measured (`measured.step` of
its result, and a table in its report), and `plan` corrects its predictions by the trainings in its
store: those on the same chip, in any number, or on CPUs of the same model and as many cores.
Nothing has to be set; `plan --no-learning` leaves them out. The logarithm of measured over
predicted time is a Gaussian process (`training/cost/learned.py`): a term of the hardware with its
software, one of each kind of work by its share of the step, one that programs of similar sizes have
in common, and noise. So a single run moves the factor by a part of what it measured, and a step
most of which is attention learns most from steps most of which is attention. Where steps were
profiled (`TrainConfig.profile`), each kind's time is a measurement of its own. The ends of the
interval are those of the table to the power of the width below, which is 1 without a run."""
ROWS = """No run of this project on a chip is among these. Instead, the rows of one source and chip
stand for a store: each row is predicted by numbers that were fitted without its source, and
corrected by the other rows of its group. The process's four deviations were chosen with these
groups in sight."""
FEW = f"""With fewer runs, drawn {_DRAWS} times for each row of a group with more than {RUNS[-1]}
others:"""
CPU = """On a CPU nothing is published, and the table is a guess at a core (40 GFLOP/s, 5 GB/s) with
an interval of 0.15 to 7. `python -m tests.bench.learned_plan STORE` trains 20 small models of
different shapes (1 to 4 layers of 64 to 256, 64 to 4,096 tokens a step, AdamW and Muon) in one
store. On two cores with nothing else, six of them trained again differed by 3 % (median). The guess
erred by 132 % in the median (90th percentile 230 %); corrected by the runs before it, 29 % (86 %);
by all other runs, 19 % (55 %), with 95 % of the runs inside an interval that had become narrower.
With up to a dozen other processes, equal runs differed by 38 %, and the errors were 40, 41 and 25
%. The times of single kinds in profiles made it worse (29 %, 88 %), as operations wait for cores:
on a CPU they are in reports, and plans learn from whole steps. On a chip, learning from profiles
was tested on synthetic stores only."""
CONTRIBUTE = """Your own plans need nothing but your runs. For everyone else's, add a line to
`tests/bench/published/rows.csv`: `ponente show FILE train --json` has the shape under `model`, the
batch and the length under `train`, and under `measured.step` the hardware and the seconds of a
step; `tok_s_chip` is batch x length / chips / seconds. Write as `source` who measured it and where.
`python -m tests.bench.predictions` then prints the constants of `training/cost/step_time.py`, and
with `--write` makes this page. A report with a profile is as welcome: its parts show which term of
the table is wrong."""


def measured(rows: Rows) -> list[Measurement]:
    """Of each row, measured over predicted time, by numbers that were fitted without its source."""
    found: dict[int, Measurement] = {}
    for source in sorted(set(rows.sources)):
        own = rows.sources == source
        numbers = fit(rows, rows.tuned & ~own)
        for index in np.flatnonzero(own).tolist():
            row = rows.rows[index]
            parts = times(work(row.job, row.chip), row.chip, rates(numbers, row.chip))
            seconds = sum(parts.values())
            shares = {kind: part / seconds for kind, part in parts.items()}
            found[index] = Measurement(float(rows.measured[index] / seconds), shares, place(row))
    return [found[index] for index in range(len(rows.rows))]


def place(row: Row) -> tuple[float, ...]:
    """`training.cost.learned.place_of` of a published row."""
    model, job = row.job.model, row.job
    sizes = (job.tokens, model.embed, model.layers, model.padded_vocab_size, job.sequence_length)
    return tuple(map(math.log, sizes))


def groups(rows: Rows) -> dict[tuple[str, str], list[int]]:
    """Indices of the rows of a source and a chip."""
    found = defaultdict(list)
    for index, row in enumerate(rows.rows):
        found[row.source, row.chip.name].append(index)
    return {name: each for name, each in found.items() if len(each) >= LEAST}


def errors(
    rows: Rows,
    said: Sequence[Measurement],
    chosen: Sequence[int],
    known: Callable[[int], Sequence[int]],
) -> np.ndarray:
    """(|error|, inside the interval, its width over the table's) of each chosen row, corrected."""
    found = []
    for index in chosen:
        one = said[index]
        made = correction(one.shares, one.place, [said[other] for other in known(index)], CHIPS)
        low, high = (end**made.narrowed for end in RANGES[rows.classes[index]])
        inside = low <= one.ratio / made.factor <= high
        found.append((abs(made.factor / one.ratio - 1), inside, made.narrowed))
    return np.array(found)


def section(rows: Rows) -> list[str]:
    """Lines of the page."""
    said, stores = measured(rows), groups(rows)
    every = [index for group in stores.values() for index in group]
    lines = [
        *("", "## What your own runs change", "", *paragraph(HOW), "", *paragraph(ROWS), ""),
        "| rows as a store | number | median of the error's size: table | corrected "
        "| 90th percentile: table | corrected | inside | width |",
        "|---|---|---|---|---|---|---|---|",
    ]
    own = {index: group for group in stores.values() for index in group}
    named = {f"{source}, {chip}": group for (source, chip), group in sorted(stores.items())}
    for name, chosen in {"all": every, **named}.items():
        before = errors(rows, said, chosen, lambda _: ())
        after = errors(rows, said, chosen, lambda i: [n for n in own[i] if n != i])
        cells = [f"{f(each[:, 0]):.1%}" for f in (np.median, _tail) for each in (before, after)]
        cells += [f"{after[:, 1].mean():.0%}", f"{after[:, 2].mean():.2f}"]
        lines.append(f"| {name} | {len(chosen)} | {' | '.join(cells)} |")
    lines += [
        *("", *paragraph(FEW), ""),
        "| other runs | median of the error's size | 90th percentile | inside | width |",
        "|---|---|---|---|---|",
    ]
    random = np.random.default_rng(0)
    wide = [index for index in every if len(own[index]) > RUNS[-1]]
    for count in RUNS:

        def drawn(index: int, count: int = count) -> Sequence[int]:
            others = [n for n in own[index] if n != index]
            return random.choice(others, count, replace=False).tolist()

        found = np.concatenate([errors(rows, said, wide, drawn) for _ in range(_DRAWS)])
        lines.append(
            f"| {count} | {np.median(found[:, 0]):.1%} | {_tail(found[:, 0]):.1%} | "
            f"{found[:, 1].mean():.0%} | {found[:, 2].mean():.2f} |"
        )
    return [*lines, "", *paragraph(CPU), "", "## Contribute a row", "", *paragraph(CONTRIBUTE)]


def _tail(sizes: np.ndarray) -> float:
    return float(np.quantile(sizes, 0.9))
