"""The record of a run, read from its event log.

The log is the only source: `<prefix>/events/<run id>.jsonl`, to which the driver appends during the
run. A driver can be killed at any moment, so the last line may be torn and the end may be missing;
neither is an error. Unknown events and fields are ignored, and no known one is required. The driver
summarises the log again and again (see `run_summary.py`), so that readers begin where it did.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import msgspec

from pipeline.store import process, run_summary, storage
from pipeline.store.append import Tail
from pipeline.store.parallel import concurrently

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

KILLED = "killed (no exit record)"
_KILLED_AFTER = 900.0  # seconds without an event, for a run without a summary

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
        file: the experiment's file, on the machine of the driver.
        driver: the driver's process; empty for a run without a summary.
        alive: whether the driver lived when the record was read.
        torn: number of lines of the log that could not be read.
        page: whether its page was written; `pages`: URLs of those of its targets, by label.
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
    file: str = ""
    driver: dict[str, Any] = field(default_factory=dict)
    alive: bool = False
    steps: dict[str, StepRecord] = field(default_factory=dict)
    torn: int = 0
    page: bool = True
    pages: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the experiment; by default its file's name without the extension."""
        return self.experiment or (PurePath(self.command[0]).stem if self.command else self.run)

    @property
    def ending(self) -> str:
        """The outcome in words."""
        running = "running" if self.alive else KILLED
        return "finished" if self.outcome == "ok" else self.outcome or running

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


class Follower:
    """Reads a run's record, later only what was appended; its driver, from its file `own_log`."""

    def __init__(self, prefix: str, run_id: str, details: bool = True, own_log: str = "") -> None:
        self._prefix, self._details, self._rest = prefix, details, b""
        self._judged = -run_summary.BEAT_SECONDS  # when `alive` was judged, on the monotonic clock
        self._record, read, driver = RunRecord(run_id), 0, {}
        url = run_summary.log_url(prefix, run_id)
        summary: dict[str, Any] = {} if own_log else run_summary.load(prefix, run_id)
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            record, at = _record({**summary["record"], "run": run_id}), int(summary["read"])
            # After a power failure a disk may have the summary without all that it summarises.
            if not storage.is_local(url) or at <= (storage.size(url) or 0):
                self._record, read, driver = record, at, dict(summary["process"])
        self._record.driver = driver
        self._tail = Tail(own_log or url, read)

    def look(self) -> RunRecord:
        """The record as it is now; the same object at every look."""
        record = self._record
        if not record.outcome:
            record.torn -= bool(self._rest)
            *lines, self._rest = (self._rest + self._tail.more()).split(b"\n")
            self._apply([line for line in lines if line.strip()])
            record.torn += bool(self._rest)
            _close(record)
        record.alive = not record.outcome and self._lives()
        return record

    def _lives(self) -> bool:
        record = self._record
        if not record.driver:
            return time.time() - record.last <= _KILLED_AFTER
        here = process.is_here(record.driver)
        if not here and time.monotonic() - self._judged < run_summary.BEAT_SECONDS:
            return record.alive
        self._judged = time.monotonic()
        return run_summary.lives(self._prefix, record.run, record.driver)

    def _apply(self, lines: list[bytes]) -> None:
        for line in lines:
            if self._details or not any(mark in line for mark in _DETAILS):
                _apply_line(self._record, line)
        if not self._details:
            # The last event of a killed run is usually one of the skipped details.
            self._record.last = max(self._record.last, _last(lines))

    def begin(self, event: dict[str, Any]) -> None:
        """Apply the run's first event, by its driver, if its log cannot be written."""
        if not self.look().started:
            line = json.dumps({"time": time.time(), **event}, default=str)
            _apply_line(self._record, line.encode())

    def save(self) -> None:
        """Write the run's summary, by its driver."""
        record = msgspec.to_builtins(self.look())
        record["torn"] -= bool(self._rest)
        run_summary.save(self._prefix, record, self._tail.read - len(self._rest))


def read(prefix: str, run_id: str) -> RunRecord:
    """The record of one run.

    Raises:
        FileNotFoundError: when the store has no log of that run.
    """
    found = Follower(prefix, run_id).look()
    if not found.driver and not storage.exists(url := run_summary.log_url(prefix, run_id)):
        raise FileNotFoundError(f"{url}: found no log of this run")
    return found


def runs(prefix: str, newest: int = 100) -> list[RunRecord]:
    """The runs in a store, newest first; those without a summary lack the progress of their steps.

    Only the `newest` by name, which starts with the date, are read: a store may have years of runs.
    """
    ids = run_summary.run_ids(prefix)
    pages = set(storage.list_names(storage.join(prefix, "reports")))

    def record(run: str) -> RunRecord:
        found = Follower(prefix, run, details=ids[run]).look()
        found.page = f"{run}.html" in pages
        return found

    chosen = sorted(ids, reverse=True)[:newest]
    found = concurrently(record, chosen, prefix)
    return sorted(found, key=lambda r: (r.started, r.run), reverse=True)


def _record(tree: dict[str, Any]) -> RunRecord:
    """The record that the tree was made of; unknown fields are ignored."""
    record = _made(RunRecord, tree)
    record.steps = {key: _made(StepRecord, step) for key, step in record.steps.items()}
    for step in record.steps.values():
        step.attempts = [_made(Attempt, attempt) for attempt in step.attempts]
    return record


def _made(kind: type[Any], tree: dict[str, Any]) -> Any:
    known = kind.__dataclass_fields__
    return kind(**{name: value for name, value in tree.items() if name in known})


def _last(lines: list[bytes]) -> float:
    """When the last readable line was written; 0 if no line is readable."""
    for line in reversed(lines):
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
    elif kind in ("run_finished", "stopping"):
        record.cause, record.pages = str(event.get("cause") or ""), event.get("pages") or {}
        if kind == "run_finished":
            record.ended, record.outcome = now, str(event.get("outcome") or "ok")
    elif "key" in event:
        label = str(event.get("step", "?"))
        step = record.steps.setdefault(event["key"], StepRecord(label, event["key"]))
        _apply(step, kind, event, now)


def _start(record: RunRecord, event: dict[str, Any], now: float) -> None:
    record.started = now
    record.store = event.get("store") or ""
    record.experiment = str(event.get("experiment") or "")
    record.file = str(event.get("file") or "")
    record.command = [str(word) for word in event.get("command") or ()]
    record.settings = event.get("settings") or {}
    for node in event.get("graph") or ():
        record.steps[node["key"]] = _made(StepRecord, {"label": "?", **node})


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
