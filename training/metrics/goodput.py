"""Accounts for the wall time of a whole run over all its attempts; the parts add up to the total.

An attempt's work counts up to the checkpoint that the next attempt resumed from. The work after
that checkpoint was done again, and is lost (`redone`). When an attempt resumed from an older
checkpoint than the newest, all work since that checkpoint is lost, over all attempts that did it.
An attempt that ended before it had its state (while restoring or compiling) is lost as a whole: it
has no first step, so it does not change how the others' work counts. While no later attempt has a
first step, the account assumes that the next one will resume from the newest checkpoint. The time
from an attempt's last row to the start of the next attempt is `dead`: the kill, the wait
for machines, the start of processes, and up to one interval of its rows. The last attempt
counts in full.

Attempts are ordered by the lease number in their names, or by start time when a name has none.
Clocks of two machines may differ, so that an attempt seems to begin before the one before it ended.
Then the earlier attempt ends at that time if its counted work was done by then (a process that
kept running after its lease was lost); otherwise the later attempt begins where that work ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from training.metrics.attempts import Attempt, in_order
from training.metrics.stopwatch import BUCKETS

LOST = ("redone", "dead")


@dataclass(frozen=True)
class Span:
    """One attempt on the run's time axis, in seconds since the run began.

    Attributes:
        began, useful, ended: its work counts from `began` to `useful`, and is lost from `useful` to
            `ended`.
        checkpoints: (time, step) of the checkpoints that it took.
        dead: seconds from its end to the start of the next attempt.
    """

    attempt: Attempt
    began: float
    useful: float
    ended: float
    checkpoints: tuple[tuple[float, int], ...]
    dead: float


@dataclass(frozen=True)
class Account:
    """Seconds of a run by what they were spent on.

    Attributes:
        total: from the start of the first attempt to the last row of the last one.
        parts: counted seconds of every bucket, and those of `LOST`; they add up to `total`.
    """

    total: float
    parts: Mapping[str, float]
    spans: tuple[Span, ...]

    @property
    def goodput(self) -> float:
        """Share of the total spent on steps that were applied and not redone; NaN if it is 0."""
        return self.parts["step"] / self.total if self.total else math.nan


def account(attempts: Sequence[Attempt]) -> Account:
    """The account of a run, of all its attempts in any order."""
    attempts = in_order(attempts)
    parts = dict.fromkeys((*BUCKETS, *LOST), 0.0)
    spans: list[Span] = []
    origin = begins = attempts[0].began if attempts else 0.0
    for index, attempt in enumerate(attempts):
        kept = _counted(attempt, attempts[index + 1 :])
        counted = sum(kept.values())
        ends = begins + max(attempt.seconds, counted)
        following = attempts[index + 1].began if index + 1 < len(attempts) else ends
        ends = max(begins + counted, min(ends, following))
        next_begins = max(following, ends)
        for bucket, seconds in kept.items():
            # Another version of this code may have written unknown buckets.
            parts[bucket if bucket in BUCKETS else "other"] += seconds
        # Float sums of the same seconds in another order may differ in the last bits: clip at 0.
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


def _counted(attempt: Attempt, later: Sequence[Attempt]) -> Mapping[str, float]:
    """The attempt's buckets at the moment when its counted work ended."""
    if not later:
        return attempt.buckets
    first = attempt.first_step
    if first is None:
        return {}
    newest = attempt.marks[-1].step if attempt.marks else first
    # The minimum: a later attempt may resume from an older checkpoint than the next one did.
    resumed = min((a.first_step for a in later if a.first_step is not None), default=newest)
    closed = attempt.outcome != "running" and resumed == attempt.last_step
    # A later attempt that resumed from a step after `last_step` proves that the rows stop short of
    # the last checkpoint.
    if closed or resumed > attempt.last_step:
        return attempt.buckets
    marks = [m for m in attempt.marks if first < m.step <= resumed]
    return marks[-1].buckets if marks else {}
