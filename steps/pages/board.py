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
        noise=[(setting, noise(losses, setting)) for setting in settings_of(losses)],
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
    settings = settings_of(losses)
    spread = {setting: noise(losses, setting) for setting in settings}
    rows = []
    for entry in dict.fromkeys(entry for entry, _ in losses):
        own = {s: losses[entry, s] for s in settings if (entry, s) in losses}
        found = {s: _difference(own[s], losses[first, s], spread[s]) for s in own}
        halves = [d.half for d in found.values() if d.half is not None]
        half = math.hypot(*halves) / len(found) if len(halves) == len(found) else None
        overall = Difference(statistics.fmean(d.mean for d in found.values()), half)
        means = {s: statistics.fmean(values.values()) for s, values in own.items()}
        rows.append(Row(entry, means, found, overall))
    return sorted(rows, key=lambda row: row.mean)


def settings_of(losses: Losses) -> list[str]:
    return list(dict.fromkeys(setting for _, setting in losses))


def noise(losses: Losses, setting: str) -> tuple[float, int]:
    """Standard deviation of the loss over seeds in nats, pooled over entries, and its freedom."""
    groups = [list(by.values()) for (_, s), by in losses.items() if s == setting]
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return math.nan, 0
    squares = math.fsum(statistics.variance(g) * (len(g) - 1) for g in groups if len(g) > 1)
    return math.sqrt(squares / freedom), freedom


def _difference(
    own: Mapping[int, float], other: Mapping[int, float], spread: tuple[float, int]
) -> Difference:
    """Of means; runs of equal seeds share only the seed, so their noise is independent."""
    mean = statistics.fmean(own.values()) - statistics.fmean(other.values())
    if own is other:
        return Difference(0.0, 0.0)
    deviation, freedom = spread
    if not freedom:
        return Difference(mean, None)
    from scipy.stats import t

    error = deviation * math.sqrt(1 / len(own) + 1 / len(other))
    return Difference(mean, float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * error)


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
