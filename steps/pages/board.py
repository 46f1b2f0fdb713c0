"""A ranking of recipes by validation loss over sizes, budgets and seeds, with what is noise."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline import InputError, Result, StepContext, step
from pipeline.store import storage
from steps.artifacts import Checkpoint, Report

CONFIDENCE = 0.95

Losses = Mapping[tuple[str, str], Mapping[int, float]]
"""(entry, setting) -> seed -> loss in nats per token."""


def _check(arguments: Mapping[str, Any]) -> None:
    runs, cells = arguments["runs"], arguments["cells"]
    if len(runs) != len(cells) or len(set(cells)) < len(cells):
        raise InputError(
            f"board: {len(runs)} runs and {len(cells)} cells; give each run an entry, a setting "
            "and a seed of its own"
        )
    missing = {setting for _, setting, _ in cells} - {
        setting for entry, setting, _ in cells if entry == arguments["first"]
    }
    if missing:
        raise InputError(
            f"board: {arguments['first']!r}, with which entries are compared, has no run of "
            f"{', '.join(sorted(missing))}; name an entry that has"
        )


@step(output=Report, version=1, check=_check)
def board(
    run: StepContext,
    runs: tuple[Checkpoint, ...],
    *,
    cells: tuple[tuple[str, str, int], ...],
    first: str,
    public: tuple[tuple[str, float], ...] = (),
    costs: tuple[tuple[str, str], ...] = (),
) -> Result:
    """The HTML page of recipes ranked by their validation loss.

    Args:
        runs: finished runs.
        cells: entry, setting (such as a size and a budget) and seed of each run.
        first: the entry with which the others are compared, seed by seed.
        public: (entry, rank or steps, less is better) of a public ranking.
        costs: (entry, text), what a larger model costs by the recipe.
    """
    losses: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for each, (entry, setting, seed) in zip(runs, cells, strict=True):
        losses[entry, setting][seed] = float(each.result["last"]["loss"])
    table = ranked(losses, first)
    agreement = spearman({row.entry: row.mean for row in table}, dict(public))
    from steps.pages import page

    text = page.render(
        "board",
        first=first,
        rows=_rows(table, dict(costs)),
        agreement=agreement,
        public=len({row.entry for row in table} & {name for name, _ in public}),
    )
    with run.shard("page") as directory:
        storage.write_atomic(storage.join(directory, "index.html"), text.encode())
    best = table[0]
    return {
        "ranking": [_plain(row) for row in table],
        "rank_correlation": agreement,
        "headline": [f"best of {len(table)} entries: {best.entry} ({best.difference} to {first})"],
    }


@dataclass(frozen=True)
class Difference:
    """Mean difference of losses to another entry, nats per token, and half its 95 % interval.

    The half is None where no entry has two seeds.
    """

    mean: float
    half: float | None

    @property
    def real(self) -> bool:
        """Whether the interval excludes 0."""
        return self.half is not None and abs(self.mean) > self.half

    def __str__(self) -> str:
        text = f"{self.mean:+.4f}"
        return text if self.half is None else f"{text} ± {self.half:.4f}"


@dataclass(frozen=True)
class Row:
    """One entry.

    Attributes:
        losses: setting -> mean loss over seeds.
        differences: setting -> difference to the first entry.
        difference: the mean of these over settings.
        mean: `difference.mean`, the key of the ranking.
    """

    entry: str
    losses: Mapping[str, float]
    differences: Mapping[str, Difference]
    difference: Difference

    @property
    def mean(self) -> float:
        return self.difference.mean


def ranked(losses: Losses, first: str) -> list[Row]:
    """The entries, the lowest mean difference to `first` before the others."""
    runs = {cell: list(by.values()) for cell, by in losses.items()}
    settings, rows = list(dict.fromkeys(setting for _, setting in losses)), []
    for entry in dict.fromkeys(entry for entry, _ in losses):
        own = {s: runs[entry, s] for s in settings if (entry, s) in runs}
        pairs = {s: (values, runs[first, s]) for s, values in own.items()}
        found = {s: difference(pair) for s, pair in pairs.items()}
        means = {s: statistics.fmean(values) for s, values in own.items()}
        rows.append(Row(entry, means, found, difference(*pairs.values())))
    return sorted(rows, key=lambda row: row.mean)


def difference(*pairs: tuple[Sequence[float], Sequence[float]]) -> Difference:
    """The mean over pairs of the difference of their means, by Welch's t with its freedom.

    Runs of one seed share only their initial parameters, so their noise is independent.
    """
    mean = statistics.fmean(statistics.fmean(a) - statistics.fmean(b) for a, b in pairs)
    groups = [group for pair in pairs for group in pair]
    if all(a is b for a, b in pairs):
        return Difference(0.0, 0.0)
    if min(map(len, groups)) < 2:
        return Difference(mean, None)
    from scipy.stats import t

    parts = [statistics.variance(group) / len(group) / len(pairs) ** 2 for group in groups]
    total = math.fsum(parts)
    if not total:
        return Difference(mean, 0.0)
    each = zip(parts, groups, strict=True)
    freedom = total**2 / math.fsum(part**2 / (len(group) - 1) for part, group in each)
    return Difference(mean, float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(total))


def spearman(one: Mapping[str, float], other: Mapping[str, float]) -> float | None:
    """Rank correlation over the names in both; None with fewer than three."""
    names = [name for name in one if name in other]
    if len(names) < 3:
        return None
    from scipy.stats import spearmanr

    return float(spearmanr([one[n] for n in names], [other[n] for n in names]).statistic)


def _rows(table: Sequence[Row], costs: Mapping[str, str]) -> list[list[str]]:
    from steps.pages.page import Best

    settings = list(dict.fromkeys(s for row in table for s in row.losses))
    best = {s: min(row.losses[s] for row in table if s in row.losses) for s in settings}
    cost = ["130M on v6e"] if costs else []
    found = [["", "entry", "mean difference", "", *settings, *cost]]
    for place, row in enumerate(table, 1):
        verdict = "within noise" if row.difference.half and not row.difference.real else ""
        cells = [
            (Best if row.losses[s] == best[s] else str)(f"{row.losses[s]:.4f}")
            if s in row.losses
            else "-"
            for s in settings
        ]
        price = [costs.get(row.entry, "-")] if costs else []
        found.append([str(place), row.entry, str(row.difference), verdict, *cells, *price])
    return found


def _plain(row: Row) -> dict[str, Any]:
    return {
        "entry": row.entry,
        "difference": row.difference.mean,
        "half_interval": row.difference.half,
        "losses": dict(row.losses),
        "differences": {s: [d.mean, d.half] for s, d in row.differences.items()},
    }
