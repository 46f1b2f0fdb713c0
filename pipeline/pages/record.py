"""The record of a run, read from its event log.

The log is the only source: `<prefix>/events/<run id>.jsonl`, or the parts of it that sort behind
that name, to which the driver appends during the run. A driver can be killed at any moment, so the
last line may be torn and the end may be missing; neither is an error. Unknown events and fields are
ignored, and no known one is required.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from pipeline.execute.logs import Tail
from pipeline.store import storage

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
"""State of a step -> its text on a page, most urgent first."""

DONE = ("executed", "elsewhere", "reused")
"""States in which the run had the step's output."""

OUTCOMES = {"ok": "finished", "plan": "plan", "": "running"}
_KILLED_AFTER = 900.0  # seconds without an event

# These events are most of a long log and change no step's state. Quotes inside a JSON string are
# escaped, so the text of a message cannot match.
_DETAILS = (b'"event": "progress"', b'"event": "shard"')


@dataclass
class Attempt:
    """One execution of a step, on the driver's clock (Unix seconds).

    Attributes:
        ended: None until its end is reported.
        status: "running", "published", "reused", "retried", "failed" or "stopped".
    """

    name: str
    log: str
    started: float
    ended: float | None = None
    status: str = "running"
    cause: str = ""


@dataclass
class StepRecord:
    """One step of a run.

    Attributes:
        label, key, step, directory, inputs, config: from the run's graph; `inputs` maps
            argument names to keys, `config` is canonical (see `fingerprint.py`).
        state: a key of `STATES`.
        seconds: how long the output took to build, in this run or (reused) when it was built.
        origin: the other store or adopted directory that a reused output came from.
        reason: why it runs, or what it waits for; may be empty.
        queued, ended: Unix seconds; None if that did not happen.
        progress: the last reported progress, such as "40 of 100 steps, loss 4.1".
        shards, shard_bytes: finished during this run, as far as its log says.
    """

    label: str
    key: str
    step: str = ""
    directory: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    state: str = "unneeded"
    seconds: float | None = None
    origin: str = ""
    reason: str = ""
    cause: str = ""
    log: str = ""
    queued: float | None = None
    ended: float | None = None
    attempts: list[Attempt] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    progress: str = ""
    shards: int = 0
    shard_bytes: int = 0
    warnings: list[str] = field(default_factory=list)


@dataclass
class RunRecord:
    """One run.

    Attributes:
        outcome: "ok", "failed", "interrupted", "plan" (not a run, see `graph --html`); empty when
            the log has no end, because the driver was killed or still runs.
        cause: why the run as a whole ended, when that was not a step's failure.
        commit: the git commit of the code that declared the run.
        started, ended, last: Unix seconds of the first event, the end, and the last event.
        steps: by key, inputs first.
        torn: number of lines of the log that could not be read.
        page: whether its page has been written.
    """

    run: str
    store: str = ""
    command: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    started: float = 0.0
    ended: float | None = None
    last: float = 0.0
    outcome: str = ""
    cause: str = ""
    commit: str = ""
    experiment: str = ""
    steps: dict[str, StepRecord] = field(default_factory=dict)
    torn: int = 0
    page: bool = True

    @property
    def name(self) -> str:
        """Name of the experiment; by default its file's name without the extension."""
        return self.experiment or (PurePath(self.command[0]).stem if self.command else self.run)

    @property
    def ending(self) -> str:
        """The outcome in words."""
        if not self.outcome and time.time() - self.last > _KILLED_AFTER:
            return "killed (no exit record)"
        return OUTCOMES.get(self.outcome, self.outcome)

    @property
    def wall(self) -> float:
        """Seconds from the first event to the end, or to the last event when there is no end."""
        return max(0.0, (self.ended if self.ended is not None else self.last) - self.started)

    @property
    def saved(self) -> float:
        """Seconds that the reused outputs took when they were built."""
        return sum(step.seconds or 0.0 for step in self.among("reused", "elsewhere"))

    @property
    def trained(self) -> StepRecord | None:
        """The last step that reported a loss in this run; a reused step reports no result."""
        for step in reversed(self.steps.values()):
            last = step.result.get("last")
            if isinstance(last, dict) and isinstance(last.get("loss"), (int, float)):
                return step
        return None

    def among(self, *states: str) -> list[StepRecord]:
        """Steps in any of these states, inputs first."""
        return [step for step in self.steps.values() if step.state in states]


def read(prefix: str, run_id: str) -> RunRecord:
    """The record of one run.

    Raises:
        FileNotFoundError: when the store has no log of that run.
    """
    url = _url(prefix, run_id)
    if not storage.exists(url):
        raise FileNotFoundError(f"{url}: found no log of this run")
    return _fold(run_id, _lines(url))


def runs(prefix: str, newest: int = 100) -> list[RunRecord]:
    """The runs in a store, newest first, without the progress of their steps.

    Runs older than the `newest` (by name, which starts with the date) are not read, so that a
    store with years of runs is still listed fast.
    """
    names = storage.list_names(storage.join(prefix, "events"))
    logs = [name.removesuffix(".jsonl") for name in names if name.endswith(".jsonl")]
    pages = set(storage.list_names(storage.join(prefix, "reports")))

    def record(name: str) -> RunRecord:
        found = _fold(name, _lines(_url(prefix, name)), details=False)
        found.page = f"{name}.html" in pages
        return found

    # Threads: on an object store each log is a round trip.
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(record, sorted(logs, reverse=True)[:newest]))
    return sorted(found, key=lambda r: (r.started, r.run), reverse=True)


def _url(prefix: str, run_id: str) -> str:
    return storage.join(prefix, "events", f"{run_id}.jsonl")


def _lines(url: str) -> list[bytes]:
    return [line for line in Tail(url).more().split(b"\n") if line.strip()]


def _fold(run_id: str, lines: list[bytes], details: bool = True) -> RunRecord:
    record = RunRecord(run_id)
    kept = lines if details else [x for x in lines if not any(mark in x for mark in _DETAILS)]
    for line in kept:
        _apply_line(record, line)
    if record.started and record.ended is None and not details:
        # The last event of a killed run is usually one of the skipped details.
        record.last = max(record.last, _last(lines))
    _close(record)
    return record


def _last(lines: Iterable[bytes]) -> float:
    """When the last readable line was written; 0 if no line is readable."""
    for line in reversed(list(lines)):
        try:
            return float(json.loads(line)["time"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0.0


def _apply_line(record: RunRecord, line: bytes) -> None:
    try:
        event = json.loads(line)
        kind, now = event["event"], float(event["time"])
    except (ValueError, KeyError, TypeError):
        record.torn += 1
        return
    record.started = record.started or now
    record.last = max(record.last, now)
    if kind == "run_started":
        _start(record, event, now)
    elif kind == "provenance":
        record.commit = str((event.get("git") or {}).get("commit") or "")
    elif kind == "run_finished":
        record.ended, record.outcome = now, str(event.get("outcome") or "ok")
        record.cause = str(event.get("cause") or "")
    elif "key" in event:
        label = str(event.get("step", "?"))
        step = record.steps.setdefault(event["key"], StepRecord(label, event["key"]))
        _apply(step, kind, event, now)


def _start(record: RunRecord, event: dict[str, Any], now: float) -> None:
    record.started = now
    record.store = event.get("store") or ""
    record.experiment = str(event.get("experiment") or "")
    record.command = [str(word) for word in event.get("command") or ()]
    record.settings = event.get("settings") or {}
    for node in event.get("graph") or ():
        record.steps[node["key"]] = StepRecord(
            label=node.get("label", "?"),
            key=node["key"],
            step=node.get("step", ""),
            directory=node.get("directory", ""),
            inputs=dict(node.get("inputs") or {}),
            config=dict(node.get("config") or {}),
        )


def _apply(step: StepRecord, kind: str, event: dict[str, Any], now: float) -> None:
    """Change a step's record by one event."""
    cause = event.get("cause") or ""
    if kind == "hit":
        step.origin = event.get("origin") or ""
        step.state = "elsewhere" if step.origin else "reused"
        step.seconds = event.get("seconds")
    elif kind == "queued":
        step.state, step.queued = "waiting", now
        reason = event.get("reason") or ""
        step.reason = reason if isinstance(reason, str) else "; ".join(map(str, reason))
    elif kind == "waiting":
        step.state = "waiting"
        step.reason = f"waiting for {event.get('holder')}, which is already building it"
    elif kind == "started":
        _end(step, now, "stopped", "no end was reported")
        step.state, step.log = "running", event.get("log") or ""
        step.attempts.append(Attempt(event.get("attempt") or "", step.log, now))
    elif kind == "progress":
        amount = f"{event.get('done') or 0:,.0f} of {event.get('total') or 0:,.0f}"
        note = event.get("note")
        step.progress = f"{amount} {event.get('unit') or ''}".rstrip() + (
            f", {note}" if note else ""
        )
    elif kind == "shard":
        step.shards += 1
        step.shard_bytes += event.get("bytes") or 0
    elif kind == "warning":
        step.warnings.append(str(event.get("message", "")))
    elif kind == "retried":
        step.state, step.cause = "waiting", cause
        _end(step, now, "retried", cause)
    elif kind == "finished":
        _finish(step, event, now)
    elif kind == "failed":
        step.state, step.cause, step.ended = "failed", cause, now
        step.log = event.get("log") or step.log
        _end(step, now, "failed", cause)


def _finish(step: StepRecord, event: dict[str, Any], now: float) -> None:
    status = event.get("status", "published")
    step.seconds, step.ended, step.cause = event.get("seconds"), now, ""
    step.result = event.get("result") or {}
    if status == "reused":
        step.state, step.reason = "reused", "another run published it while this one waited"
    else:
        step.state = "executed"
        if not any(a.status == "running" for a in step.attempts):
            step.attempts.append(Attempt("", step.log, now - (step.seconds or 0.0)))
    _end(step, now, status, "")


def _end(step: StepRecord, now: float, status: str, cause: str) -> None:
    for attempt in step.attempts:
        if attempt.status == "running":
            # Workers put their own time on events, and clocks differ.
            attempt.ended = max(now, attempt.started)
            attempt.status, attempt.cause = status, cause


def _close(record: RunRecord) -> None:
    """Close the steps that were running or waiting when the run ended."""
    if record.ended is None:
        return
    begun = any(step.queued or step.attempts for step in record.steps.values())
    if record.outcome != "ok" and not begun:
        for step in record.among("unneeded"):
            step.state = "unreached"
    for step in record.among("waiting"):
        step.state = "stopped" if step.attempts else "unreached"
    for step in record.among("running"):
        step.state = "stopped"
        _end(step, record.ended, "stopped", "the run ended")
