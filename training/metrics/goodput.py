"""Where the wall time of a whole run went, over all its attempts; the parts add up to it.

An attempt that another one followed counts up to the checkpoint it resumed from: what it did
after that was done again, and is lost (`redone`). Where an attempt resumed from an older checkpoint
than the last, everything since that one is lost, whichever attempts did it. So is an attempt that
ended before it had its state (restoring, compiling): it resumed from nothing, and says nothing of
what became of the others' work. Before the next attempt, the newest checkpoint is taken for
the one that it will resume from. From an attempt's last sign of life to the beginning of the next
nothing happened that is known of (`dead`: the kill, the wait for machines, the start of processes;
up to one interval of the journal of training as well). The last attempt counts in full.

Attempts follow one another, in the order of their leases where their names tell it, else of the
times they began. Where the clocks of two machines say that one began before the other had ended,
the earlier one ends there if it had taken the checkpoint by then (a process that was given up but
lived on), else the later one is taken to begin when it had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from training.metrics.journal import Attempt, in_order
from training.metrics.stopwatch import BUCKETS

LOST = ("redone", "dead")


@dataclass(frozen=True)
class Span:
    """One attempt on the run's time axis; seconds since the run began.

    Attributes:
        began, useful, ended: it counts from the first to the second and is lost to the third.
        checkpoints: (time, step) of those it took.
        dead: seconds from its end to the next attempt.
    """

    attempt: Attempt
    began: float
    useful: float
    ended: float
    checkpoints: tuple[tuple[float, int], ...]
    dead: float


@dataclass(frozen=True)
class Account:
    """Seconds of a run by what they went to.

    Attributes:
        total: from the beginning of the first attempt to the last sign of life of the last.
        parts: seconds of every bucket that counts, of `redone` and of `dead`; they add up to
            `total`.
        spans: the attempts in order.
    """

    total: float
    parts: Mapping[str, float]
    spans: tuple[Span, ...] = field(default=())

    @property
    def goodput(self) -> float:
        """Share of the total that went to steps which were not done again; NaN of no time."""
        return self.parts["step"] / self.total if self.total else math.nan

    @property
    def lost(self) -> float:
        """Seconds lost to restarts."""
        return sum(self.parts[name] for name in LOST)

    @property
    def restarts(self) -> int:
        """Attempts after the first."""
        return max(0, len(self.spans) - 1)

    def rows(self) -> list[tuple[str, float, float]]:
        """(part, seconds, share of the total), parts in the order of the day."""
        whole = self.total or 1.0
        return [(name, self.parts[name], self.parts[name] / whole) for name in (*BUCKETS, *LOST)]


def account(journals: Sequence[Attempt]) -> Account:
    """The account of the run that these attempts were made at, in any order."""
    attempts = in_order(journals)
    parts = dict.fromkeys((*BUCKETS, *LOST), 0.0)
    spans: list[Span] = []
    origin = begins = attempts[0].began if attempts else 0.0
    for index, attempt in enumerate(attempts):
        kept = _kept(attempt, attempts[index + 1 :])
        counted = sum(kept.values())
        ends = begins + max(attempt.seconds, counted)
        following = attempts[index + 1].began if index + 1 < len(attempts) else ends
        ends = max(begins + counted, min(ends, following))
        next_begins = max(following, ends)
        for bucket, seconds in kept.items():
            parts[bucket] += seconds
        # Sums of the same seconds in another order may differ in their last bits.
        parts["redone"] += max(0.0, ends - begins - counted)
        parts["dead"] += next_begins - ends
        spans.append(
            Span(
                attempt=attempt,
                began=begins - origin,
                useful=begins - origin + counted,
                ended=ends - origin,
                checkpoints=tuple((begins - origin + m.at, m.step) for m in attempt.marks),
                dead=next_begins - ends,
            )
        )
        begins = next_begins
    total = spans[-1].ended if spans else 0.0
    return Account(total=total, parts=parts, spans=tuple(spans))


def _kept(attempt: Attempt, later: Sequence[Attempt]) -> dict[str, float]:
    """Seconds by bucket of the part of an attempt that counts; `later` are those after it."""
    kept = dict.fromkeys(BUCKETS, 0.0)
    for bucket, seconds in _known(attempt, later).items():
        # A journal of another version of this code may have a bucket that this one has not.
        kept[bucket if bucket in kept else "other"] += seconds
    return kept


def _known(attempt: Attempt, later: Sequence[Attempt]) -> Mapping[str, float]:
    """The attempt's buckets, as they were when the part of it that counts ended."""
    if not later:
        return attempt.buckets
    first = attempt.first_step
    if first is None:
        return {}
    newest = attempt.marks[-1].step if attempt.marks else first
    resumed = min((a.first_step for a in later if a.first_step is not None), default=newest)
    ended_well = attempt.outcome != "running" and resumed == attempt.last_step
    # Where the next one knows of more steps than the journal, the journal ends before the kill.
    if ended_well or resumed > attempt.last_step:
        return attempt.buckets
    marks = [m for m in attempt.marks if first < m.step <= resumed]
    return marks[-1].buckets if marks else {}


def text(found: Account) -> str:
    """The account as a table of plain text."""
    lines = [f"{'part':<12}{'seconds':>12}{'share':>9}"]
    lines += [f"{name:<12}{seconds:>12.1f}{share:>9.1%}" for name, seconds, share in found.rows()]
    lines.append(f"{'total':<12}{found.total:>12.1f}{1:>9.1%}")
    lines.append(f"goodput {found.goodput:.1%} over {len(found.spans)} attempts")
    return "\n".join(lines)
