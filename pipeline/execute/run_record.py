"""What a run's events say of it and of its steps: one reducer, for who writes and reads the log.

A log may lack anything: no event but the first is required, and steps are found from their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import msgspec

from pipeline import events
from pipeline.events import Event

# State of a step -> its text, most urgent first.
STATES = {
    "failed": "failed",
    "running": "running",
    "stopped": "stopped",
    "waiting": "waiting",
    "unreached": "not reached",
    "planned": "to build",
    "executed": "executed",
    "elsewhere": "reused from elsewhere",
    "reused": "reused",
    "unneeded": "not needed",
}
DONE = ("executed", "elsewhere", "reused")  # states in which the run had the step's output
KILLED = "killed (no exit record)"
BUDGET_STOP, TERMINATED = "the budget was reached", "SIGTERM"
"""Causes of an interruption."""


@dataclass
class Attempt:
    """One execution of a step, on the driver's clock."""

    name: str
    log: str
    started: float
    ended: float | None = None  # until its end is reported
    status: str = "running"  # or published, reused, retried, preempted, failed, stopped
    cause: str = ""
    waited: float = 0.0  # of its seconds, those without hardware, as last reported
    waiting: bool = False  # since then too


@dataclass
class StepRecord:
    """One step of a run; the first seven fields are from the run's graph."""

    label: str = "?"
    key: str = ""
    step: str = ""
    directory: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    hardware: str = ""  # that it asks for; empty for none, and in logs of older versions
    state: str = "unneeded"
    seconds: float | None = None  # to build the output, in this run or (reused) in an earlier one
    origin: str = ""  # the other store or adopted directory that a reused output came from
    reason: str = ""  # why it runs, or what it waits for
    cause: str = ""
    log: str = ""
    queued: float | None = None  # Unix seconds, as `ended`; None if that did not happen
    ended: float | None = None
    attempts: list[Attempt] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    progress: str = ""  # the last reported one, such as "40 of 100 steps, loss 4.1"
    shards: int = 0  # finished during this run, as far as its log says
    shard_bytes: int = 0
    warnings: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)  # lines of `plan`, on its page alone

    def apply(self, event: Event) -> None:
        now = event.time
        match event:
            case events.Hit():
                self.origin, self.seconds = event.origin or "", event.seconds
                self.state = "elsewhere" if self.origin else "reused"
            case events.Queued(reason=reason):
                self.state, self.queued, self.cause = "waiting", now, ""
                self.reason = reason if isinstance(reason, str) else "; ".join(reason)
            case events.Waiting():
                self.state = "waiting"
                self.reason = f"waiting for {event.holder}, which is already building it"
            case events.WaitingForResources(cause=cause):
                self.state, self.cause = "waiting", cause
                if self.attempts and self.attempts[-1].status == "running":
                    self.attempts[-1].waited = event.seconds
                    self.attempts[-1].waiting = not event.over
            case events.Started():
                self._end("stopped", now, "no end was reported")
                self.state, self.log = "running", event.log
                self.attempts.append(Attempt(event.attempt, event.log, now))
            case events.Progress():
                amount = f"{event.done:,.0f} of {event.total:,.0f} {event.unit}".rstrip()
                self.progress = f"{amount}, {event.note}" if event.note else amount
                if self.attempts and self.attempts[-1].status == "running":
                    self.state = "running"  # it may have waited for hardware
                    self.attempts[-1].waiting = False
            case events.ShardFinished():
                self.shards += 1
                self.shard_bytes += event.bytes
            case events.Warned():
                self.warnings.append(event.message)
            case events.Retried(cause=cause):
                self.state, self.cause = "waiting", cause
                self._end("preempted" if event.preempted else "retried", now, cause)
            case events.Finished():
                self._finish(event)
            case events.Failed(cause=cause):
                self.state, self.cause, self.ended = "failed", cause, now
                self.log = event.log or self.log
                self._end("failed", now, cause)
            case events.Stopped(cause=cause):
                self.state, self.cause = "stopped", cause
                self._end("stopped", now, cause)
            case events.Skipped(cause=cause):
                self.state, self.cause = "unreached", cause

    def _finish(self, event: events.Finished) -> None:
        self.seconds, self.ended, self.cause = event.seconds, event.time, ""
        self.result = event.result
        if event.status == "reused":
            self.state, self.reason = "reused", "another run published it while this one waited"
        else:
            self.state = "executed"
            if not any(a.status == "running" for a in self.attempts):
                self.attempts.append(Attempt("", self.log, event.time - event.seconds))
        self._end(event.status, event.time, "")

    def _end(self, status: str, now: float, cause: str) -> None:
        for attempt in self.attempts:
            if attempt.status == "running":
                # Workers put their own time on events, and clocks differ.
                attempt.ended = max(now, attempt.started)
                if attempt.waiting:
                    attempt.waited = attempt.ended - attempt.started
                attempt.status, attempt.cause = status, cause

    def close(self, ended: float) -> None:
        if self.state == "running":
            self.state = "stopped"
            self._end("stopped", ended, "the run ended")
        elif self.state == "waiting":
            self.state = "stopped" if self.attempts else "unreached"


@dataclass
class RunRecord:
    """One run."""

    run: str
    store: str = ""
    command: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    started: float = 0.0  # Unix seconds of the first event, the end, and the last event
    ended: float | None = None
    last: float = 0.0
    # ok, failed, interrupted, plan (no run, see `plan --html`); empty for a log without an end.
    outcome: str = ""
    cause: str = ""  # why the run as a whole ended, when that was not a step's failure
    commit: str = ""  # of git, of the code that declared the run
    spot: bool = False  # whether it said that its machines are preemptible
    experiment: str = ""
    file: str = ""  # of the experiment, on the machine of the driver
    driver: dict[str, Any] = field(default_factory=dict)  # its process; empty without a summary
    alive: bool = False  # whether the driver lived when the record was read
    steps: dict[str, StepRecord] = field(default_factory=dict)  # by key, inputs first
    torn: int = 0  # lines of the log that could not be read
    page: bool = True  # whether its page was written
    pages: dict[str, str] = field(default_factory=dict)  # URLs of its targets' pages, by label

    @property
    def name(self) -> str:
        return self.experiment or (PurePath(self.command[0]).stem if self.command else self.run)

    @property
    def ending(self) -> str:
        running = "running" if self.alive else KILLED
        return "finished" if self.outcome == "ok" else self.outcome or running

    @property
    def wall(self) -> float:
        return max(0.0, (self.ended if self.ended is not None else self.last) - self.started)

    @property
    def saved(self) -> float:
        return sum(step.seconds or 0.0 for step in self.among("reused", "elsewhere"))

    @property
    def headline(self) -> str:
        """The first line that the last step with a headline reported; a reused one reports none."""
        said = (step.result.get("headline") for step in reversed(self.steps.values()))
        return next((str(lines[0]) for lines in said if isinstance(lines, list) and lines), "")

    @property
    def doing(self) -> str:
        """The steps that run now, with their progress and attempts."""
        return "; ".join(
            f"{step.label}: {step.progress or 'running'}"
            + (f", attempt {len(step.attempts)}" if len(step.attempts) > 1 else "")
            for step in (self.among("running") if self.alive else ())
        )

    def among(self, *states: str) -> list[StepRecord]:
        return [step for step in self.steps.values() if step.state in states]

    def apply(self, event: Event) -> None:
        """Change the record by the run's next event."""
        self.started = self.started or event.time
        self.last = max(self.last, event.time)
        match event:
            case events.RunStarted():
                self.started, self.store = event.time, event.store
                self.experiment, self.file = event.experiment, event.file
                self.command, self.settings = event.command, event.settings
                self.spot = event.spot
                graph = msgspec.convert(event.graph, list[StepRecord])
                self.steps |= {step.key: step for step in graph}
            case events.Provenance(git=git):
                self.commit = str((git or {}).get("commit") or "")
            case events.Stopping():
                self.cause = event.cause
            case events.RunFinished():
                self.ended, self.outcome = event.time, event.outcome
                self.cause, self.pages = event.cause, event.pages
                begun = any(step.queued or step.attempts for step in self.steps.values())
                for step in self.steps.values():
                    step.close(event.time)
                    if self.outcome != "ok" and not begun and step.state == "unneeded":
                        step.state = "unreached"
            case _ if event.key:
                if event.key not in self.steps:
                    self.steps[event.key] = StepRecord(event.step or "?", event.key)
                self.steps[event.key].apply(event)
