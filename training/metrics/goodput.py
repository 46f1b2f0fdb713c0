"""Accounts for the wall time of a whole run over all its attempts; the parts add up to the total.

An attempt's times are folded from the rows of its metrics log:

    config   name, build, devices and processes of the attempt
    began    the step that its state has, and whether the compiled step was loaded
    time     `buckets`: seconds by bucket until now; `step`: steps done; `startup`; `saved` where
             the state was just copied for a checkpoint, `outcome` in the last one

A row of kind "time" is written every ten seconds, after the start of every save and at the end, so
that a kill loses only seconds. Times of rows are Unix times; durations come from a monotonic clock.

An attempt's work counts up to the checkpoint that the next attempt resumed from; the work after it,
which may be of several attempts, is lost (`redone`). An attempt that ended before it had its state
(while restoring or compiling) is lost as a whole: it has no first step, so it does not change how
the others' work counts. While no later attempt has a first step, the next one is assumed to resume
from the newest checkpoint. The time from an attempt's last row to the start of the next is `dead`.
The last attempt counts in full.

Clocks of two machines may differ, so that an attempt seems to begin before the one before it ended.
Then the earlier attempt ends at that time if its counted work was done by then (a process that
kept running after its lease was lost); otherwise the later attempt begins where that work ended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.metrics.metrics_log import read_log
from training.metrics.stopwatch import BUCKETS

# The attempt names of `pipeline.execute.attempt`: the lease number, which only rises, and a nonce.
_NAME = re.compile(r"[0-9]{6,18}-[0-9a-f]{8}")


@dataclass(frozen=True)
class Mark:
    """A checkpoint, and the seconds of every bucket when its state was copied."""

    step: int
    buckets: Mapping[str, float]

    @property
    def at(self) -> float:
        """Seconds since the attempt began."""
        return sum(self.buckets.values())


@dataclass(frozen=True, kw_only=True)
class AttemptTime:
    """The times of one attempt until its last row.

    Attributes:
        build: what tells the run from others of its directory; a rebuild has another.
        began: Unix time of its start.
        first_step: step of the checkpoint that the attempt resumed from, or 0; None until its state
            is ready, so also for an attempt that ended while restoring or compiling.
        last_step: optimizer steps done.
        outcome: "running" (also of a killed attempt), "finished", "preempted" or "failed".
        startup: seconds of the parts of the startup that ended, see `training.metrics.stopwatch`.
        loaded: whether it loaded the compiled step of an earlier attempt.
    """

    attempt: str
    began: float
    buckets: Mapping[str, float]
    build: str = ""
    first_step: int | None = None
    last_step: int = 0
    outcome: str = "running"
    marks: tuple[Mark, ...] = ()
    device: str = ""
    devices: int = 0
    processes: int = 1
    startup: Mapping[str, float] = field(default_factory=dict)
    loaded: bool = False

    @property
    def seconds(self) -> float:
        return sum(self.buckets.values())


def fold(rows: Iterable[Mapping[str, Any]]) -> AttemptTime | None:
    """The attempt of a metrics log's rows; None of a log without times."""
    found: dict[str, Any] = {}
    marks = []
    for row in rows:
        if row["kind"] == "config":
            names = ("attempt", "build", "device", "devices", "processes")
            found |= {name: row[name] for name in names if name in row}
        elif row["kind"] == "began":
            found |= {"first_step": row["step"], "loaded": row.get("loaded", False)}
        elif row["kind"] == "time":
            found.setdefault("began", row["time"] - sum(row["buckets"].values()))
            found |= {name: row[name] for name in ("buckets", "startup", "outcome") if name in row}
            found["last_step"] = row["step"]
            if row.get("saved"):
                marks.append(Mark(row["step"], row["buckets"]))
    return AttemptTime(**found, marks=tuple(marks)) if "buckets" in found else None


def read_attempts(directories: Iterable[str], build: str | None = None) -> list[AttemptTime]:
    """The attempts with metrics logs in `directories`, `in_order`; of one build if it is given."""
    found = []
    for directory in directories:
        first = next(read_log(directory), None)
        if first is None or build not in (None, first.get("build")):
            continue
        if attempt := fold(read_log(directory, kinds=("config", "began", "time"))):
            found.append(attempt)
    return in_order(found)


def in_order(attempts: Iterable[AttemptTime]) -> list[AttemptTime]:
    """Attempts by lease number, which needs no clock, if all names have one; else by start time."""
    found = sorted(attempts, key=lambda each: (each.began, each.attempt))
    leases = [_NAME.fullmatch(each.attempt) for each in found]
    if not all(leases):
        return found
    return sorted(found, key=lambda each: int(each.attempt.partition("-")[0]))


LOST = ("redone", "dead")


@dataclass(frozen=True)
class Span:
    """One attempt on the run's time axis, in seconds since the run began.

    Its work counts from `began` to `useful`, and is lost from `useful` to `ended`; `dead` are the
    seconds from then to the next attempt. `checkpoints` are (time, step) of those that it took.
    """

    attempt: AttemptTime
    began: float
    useful: float
    ended: float
    checkpoints: tuple[tuple[float, int], ...]
    dead: float


@dataclass(frozen=True)
class Account:
    """Seconds of a run by what they were spent on: every bucket and `LOST`.

    They add up to `total`, from the start of the first attempt to the last row of the last one.
    """

    total: float
    parts: Mapping[str, float]
    spans: tuple[Span, ...]

    @property
    def goodput(self) -> float:
        """Share of the total spent on steps that were applied and not redone; NaN if it is 0."""
        return self.parts["step"] / self.total if self.total else math.nan


def account(attempts: Sequence[AttemptTime]) -> Account:
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
        at = begins - origin
        marks = tuple((at + mark.at, mark.step) for mark in attempt.marks)
        spans.append(Span(attempt, at, at + counted, ends - origin, marks, next_begins - ends))
        begins = next_begins
    total = spans[-1].ended if spans else 0.0
    return Account(total=total, parts=parts, spans=tuple(spans))


def _counted(attempt: AttemptTime, later: Sequence[AttemptTime]) -> Mapping[str, float]:
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
