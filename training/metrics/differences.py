"""Whether the losses of two runs differ by more than noise.

A difference has two standard errors. *Over sequences* it is a ratio of sums of pairs, since both
models were scored on the same ones (Cochran, 1977, Sampling Techniques, section 6.4); it holds for
these two models on other text. *Over seeds* it is Welch's, since configurations differ in their
spread by a factor of ten and more (docs/recipes.md); it holds for the configurations. A difference
is within noise if it is below the 97.5 % quantile of Student's t times the standard error: 1.96 for
many sequences, 2.78 to 4.30 for two times three seeds.
"""

from __future__ import annotations

import base64
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_BLOCKS = 4096
"""Sums that are kept of an evaluation: of more sequences, consecutive ones are added up."""


@dataclass(frozen=True, eq=False)
class SequenceLosses:
    """The losses of one evaluation by block of consecutive sequences, in most cases of one.

    Attributes:
        of: digest of the sequences; two evaluations with the same one can be paired.
        sequences: their number.
        sums: float64 [2, block]: negative log-likelihood in nats, and predictions that count.
    """

    of: str
    sequences: int
    sums: np.ndarray

    @staticmethod
    def row(of: str, nll: np.ndarray, tokens: np.ndarray) -> dict[str, Any]:
        """As JSON, of both by sequence; a number is in a list, because trackers draw numbers."""
        starts = np.arange(0, len(nll), max(1, -(-len(nll) // MOST_BLOCKS)))
        sums = np.add.reduceat(np.stack([nll, tokens]).astype(np.float64), starts, axis=1)
        text = base64.b64encode(sums.astype("<f4").tobytes()).decode()
        return {"of": of, "sequences": [len(nll)], "sums": text}

    @staticmethod
    def of_row(row: dict[str, Any], scale: float = 1.0) -> SequenceLosses:
        sums = np.frombuffer(base64.b64decode(row["sums"]), "<f4").reshape(2, -1)
        return SequenceLosses(row["of"], row["sequences"][0], sums * np.array([[scale], [1.0]]))


@dataclass(frozen=True)
class RunLoss:
    """One run's loss; `recipe` is the same for runs that differ in seeds alone, "" if unknown."""

    name: str
    loss: float
    recipe: str = ""
    losses: SequenceLosses | None = None


@dataclass(frozen=True)
class Difference:
    """How much larger the loss of `runs` is than that of `than`; means, if these are several.

    `error` is the standard error, of so many degrees of `freedom`; NaN where `how` says why.
    """

    runs: tuple[str, ...]
    than: tuple[str, ...]
    value: float
    error: float
    how: str
    freedom: float

    @property
    def half(self) -> float:
        """Half of the 95 % interval; NaN without a standard error."""
        from scipy.special import stdtrit

        return float(stdtrit(max(self.freedom, 1.0), 0.975) * self.error)

    @property
    def within_noise(self) -> bool:
        """False without a standard error."""
        return abs(self.value) <= self.half

    def __str__(self) -> str:
        error = f" ± {self.error:.4f}" if math.isfinite(self.error) else ""
        return f"{', '.join(self.runs)} ({self.value:+.4f}{error}, {self.how})"

    def to_json(self) -> dict[str, Any]:
        numbers = {"difference": self.value, "standard_error": self.error}
        known = {name: each for name, each in numbers.items() if math.isfinite(each)}
        return {**known, "how": self.how, "within_noise": self.within_noise}


def differences(runs: Sequence[RunLoss], reference: int | None = None) -> Iterator[Difference]:
    """Of every recipe from that of the run `reference`, by default that of the lowest loss.

    One over seeds, where both recipes have several, and one over sequences.
    """
    groups: dict[Any, list[RunLoss]] = {}
    for number, run in enumerate(runs):
        groups.setdefault(run.recipe or number, []).append(run)
    means = {recipe: math.fsum(r.loss for r in g) / len(g) for recipe, g in groups.items()}
    best = min(means, key=lambda recipe: (math.isnan(means[recipe]), means[recipe]))
    best = best if reference is None else runs[reference].recipe or reference
    than = groups.pop(best)
    for recipe, group in groups.items():
        names = tuple(run.name for run in group), tuple(run.name for run in than)
        value = means[recipe] - means[best]
        over_seeds = welch(([run.loss for run in group], [run.loss for run in than]))
        if math.isfinite(over_seeds[0]):
            yield Difference(*names, value, *over_seeds)
        yield Difference(*names, value, *_paired(group, than))


def welch(*pairs: tuple[Sequence[float], Sequence[float]]) -> tuple[float, str, float]:
    """Standard error of the mean over pairs of the difference of their means, how, and freedom.

    B. L. Welch, 1947; two runs of one seed share their initial parameters only.
    """
    groups = [group for pair in pairs for group in pair]
    if min(map(len, groups)) < 2:
        return math.nan, "one seed", 0.0
    parts = [statistics.variance(group) / len(group) / len(pairs) ** 2 for group in groups]
    squares = [part**2 / (len(group) - 1) for part, group in zip(parts, groups, strict=True)]
    how = f"over {len(groups[0])} and {len(groups[1])} seeds"
    total = math.fsum(parts)
    return math.sqrt(total), how, total**2 / math.fsum(squares) if total else 1.0


def _paired(*pair: Sequence[RunLoss]) -> tuple[float, str, int]:
    """Standard error over sequences, how it was found, and its degrees of freedom."""
    if missing := [run.name for part in pair for run in part if run.losses is None]:
        return math.nan, f"not paired: {missing[0]} has no losses by sequence", 0
    known = [[run.losses for run in part if run.losses is not None] for part in pair]
    one, tokens = known[0][0], known[0][0].sums[1]
    if any(o.of != one.of or not np.array_equal(o.sums[1], tokens) for part in known for o in part):
        return math.nan, "not paired: scored on other sequences", 0
    if (blocks := len(tokens)) < 2:
        return math.nan, "not paired: one sequence", 0
    ours, theirs = (np.mean([o.sums[0] for o in part], axis=0) for part in known)
    rest = (pairs := ours - theirs) - tokens * pairs.sum() / tokens.sum()
    error = math.sqrt(blocks / (blocks - 1) * np.square(rest).sum()) / float(tokens.sum())
    many = f" in {blocks:,} blocks" if blocks < one.sequences else ""
    return error, f"paired over {one.sequences:,} sequences{many}", blocks - 1
