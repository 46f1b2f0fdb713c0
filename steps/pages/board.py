"""A ranking of recipes by validation loss over sizes, budgets and seeds, with what is noise."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline import InputError, Result, StepContext, step
from pipeline.store import storage
from steps.artifacts import Checkpoint, Report

if TYPE_CHECKING:
    from training.metrics.differences import Difference

Losses = Mapping[tuple[str, str], Mapping[int, float]]
"""(entry, setting) -> seed -> loss in nats per token."""


def _check(arguments: Mapping[str, Any]) -> None:
    runs, cells = arguments["runs"], arguments["cells"]
    if not runs:
        raise InputError("board: expected runs, found none")
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
        first: the entry with which the others are compared.
        public: (entry, rank or steps, less is better) of a public ranking.
        costs: (entry, predicted cost of its recipe on a v6e chip with 130M parameters).
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
        "headline": [
            f"best of {len(table)} entries: {best.entry} ({_interval(best.difference)} to {first})"
        ],
    }


@dataclass(frozen=True)
class Row:
    """One entry."""

    entry: str
    losses: Mapping[str, float]  # setting -> mean over seeds
    differences: Mapping[str, Difference]  # setting -> difference to the first entry
    difference: Difference  # the mean of these over settings

    @property
    def mean(self) -> float:  # the key of the ranking
        return self.difference.value


def ranked(losses: Losses, first: str) -> list[Row]:
    """The entries, the lowest mean difference to `first` before the others."""
    runs = {cell: list(by.values()) for cell, by in losses.items()}
    settings, rows = list(dict.fromkeys(setting for _, setting in losses)), []
    for entry in dict.fromkeys(entry for entry, _ in losses):
        pairs = {s: (runs[entry, s], runs[first, s]) for s in settings if (entry, s) in runs}
        found = {s: _difference(entry, first, pair) for s, pair in pairs.items()}
        means = {s: statistics.fmean(own) for s, (own, _) in pairs.items()}
        rows.append(Row(entry, means, found, _difference(entry, first, *pairs.values())))
    return sorted(rows, key=lambda row: row.mean)


def _difference(entry: str, first: str, *pairs: tuple[list[float], list[float]]) -> Difference:
    from training.metrics.differences import Difference, welch

    value = statistics.fmean(statistics.fmean(a) - statistics.fmean(b) for a, b in pairs)
    itself = (0.0, "itself", 1.0)
    return Difference((entry,), (first,), value, *(itself if entry == first else welch(*pairs)))


def _interval(found: Difference) -> str:
    text = f"{found.value:+.4f}"
    return f"{text} ± {found.half:.4f}" if math.isfinite(found.half) else text


def spearman(one: Mapping[str, float], other: Mapping[str, float]) -> float | None:
    """Rank correlation over the names in both; None with fewer than three, or equal ranks."""
    names = [name for name in one if name in other]
    if len(names) < 3 or min(len({by[n] for n in names}) for by in (one, other)) < 2:
        return None
    from scipy.stats import spearmanr

    return float(spearmanr([one[n] for n in names], [other[n] for n in names]).statistic)


def _rows(table: Sequence[Row], costs: Mapping[str, str]) -> list[list[str]]:
    from steps.pages.page import Best

    settings = list(dict.fromkeys(s for row in table for s in row.losses))
    best = {s: min(row.losses[s] for row in table if s in row.losses) for s in settings}
    found = [["", "entry", "mean difference", "", *settings, *(["130M on v6e-1"] if costs else ())]]
    for place, row in enumerate(table, 1):
        noise = row.difference.within_noise and row.difference.how != "itself"
        verdict = "within noise" if noise else ""
        cells = [
            (Best if row.losses[s] == best[s] else str)(f"{row.losses[s]:.4f}")
            if s in row.losses
            else "-"
            for s in settings
        ]
        cells += [costs.get(row.entry, "-")] if costs else []
        found.append([str(place), row.entry, _interval(row.difference), verdict, *cells])
    return found


def _plain(row: Row) -> dict[str, Any]:
    return {
        "entry": row.entry,
        "losses": dict(row.losses),
        "difference": row.difference.to_json(),
        "differences": {s: each.to_json() for s, each in row.differences.items()},
    }
