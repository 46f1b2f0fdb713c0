"""What an attempt spent its wall time on, folded from the rows of its metrics log.

    config   name, build, devices and processes of the attempt
    began    the step that its state has, and whether the compiled step was loaded
    time     `buckets`: seconds by bucket until now; `step`: steps done; `startup`; `saved` where
             the state was just copied for a checkpoint, `outcome` in the last one

A row of kind "time" is written every ten seconds, after the start of every save and at the end, so
that a kill loses only seconds. `training.metrics.goodput` makes the account of the run of all
attempts. Times of rows are Unix times, comparable between attempts; durations come from a monotonic
clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from training.metrics.history import read_log

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
class Attempt:
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
        """Seconds from its start to its last row."""
        return sum(self.buckets.values())


def fold(rows: Iterable[Mapping[str, Any]]) -> Attempt | None:
    """The attempt of a metrics log's rows; None of a log without times, of an older version."""
    config: Mapping[str, Any] = {}
    first_step, loaded = None, False
    times: Mapping[str, Any] | None = None
    began, marks = 0.0, []
    for row in rows:
        if row["kind"] == "config":
            config = row
        elif row["kind"] == "began":
            first_step, loaded = row["step"], row.get("loaded", False)
        elif row["kind"] == "time":
            if times is None:
                began = row["time"] - sum(row["buckets"].values())
            times = row
            if row.get("saved"):
                marks.append(Mark(row["step"], row["buckets"]))
    if times is None:
        return None
    return Attempt(
        attempt=config["attempt"],
        build=config["build"],
        began=began,
        buckets=times["buckets"],
        first_step=first_step,
        last_step=times["step"],
        outcome=times.get("outcome", "running"),
        marks=tuple(marks),
        **{name: config[name] for name in ("device", "devices", "processes")},
        startup=times["startup"],
        loaded=loaded,
    )


def read_attempts(directories: Iterable[str], build: str | None = None) -> list[Attempt]:
    """The attempts with metrics logs in `directories`, `in_order`; of one build if it is given."""
    found = []
    for directory in directories:
        first = next(read_log(directory), None)
        if first is None or (build is not None and first.get("build") != build):
            continue
        if attempt := fold(read_log(directory, kinds=("config", "began", "time"))):
            found.append(attempt)
    return in_order(found)


def in_order(attempts: Iterable[Attempt]) -> list[Attempt]:
    """Attempts by lease number when all names have one, otherwise by start time.

    Lease numbers do not depend on clocks; two machines' clocks may differ by an hour.
    """
    found = sorted(attempts, key=lambda each: (each.began, each.attempt))
    leases = [_NAME.fullmatch(each.attempt) for each in found]
    if not all(leases):
        return found
    return sorted(found, key=lambda each: int(each.attempt.partition("-")[0]))
