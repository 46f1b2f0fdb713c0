"""What happened in a run, read back from its event log.

The log is the only source: `<prefix>/events/<run id>.jsonl`, appended to by the driver while the
run went on. A driver can be killed at any moment, so the last line may be torn and the end may be
missing; both are facts about the run and no errors. Events this version does not know are passed
over, and so is everything an event leaves out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pipeline.execute.logs import Tail
from pipeline.store import storage

STATES = {
    "failed": "failed",
    "running": "running",
    "stopped": "stopped",
    "waiting": "waiting",
    "unreached": "not reached",
    "executed": "executed",
    "elsewhere": "reused from elsewhere",
    "reused": "reused",
    "unneeded": "not needed",
}
"""State of a step -> what people read, in the order in which they want to know."""

DONE = ("executed", "elsewhere", "reused")
"""States in which the run had the step's output."""

# Most of a long log, and nothing in it changes the state of a step. Quotes inside a JSON string
# are escaped, so the text of a message cannot look like this.
_DETAILS = (b'"event": "progress"', b'"event": "shard"')


@dataclass
class Attempt:
    """One try at a step, on the driver's clock (Unix seconds).

    Attributes:
        name, log: as the worker announced them.
        ended: None while nothing was heard of an end.
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
        label, key, step, directory, inputs, config: as the run's graph has them; `inputs` maps
            argument names to keys, `config` is canonical (see `fingerprint.py`).
        state: a key of `STATES`.
        seconds: how long the output took to build, in this run or (reused) when it was built.
        origin: the other store or adopted directory that a reused output came from.
        reason: why it runs, or what it waited for; may be empty.
        queued, ended: Unix seconds; None when that did not happen.
        progress, note: the last that the step said, such as "40 of 100 steps" and "loss 4.1".
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
    note: str = ""
    shards: int = 0
    shard_bytes: int = 0
    warnings: list[str] = field(default_factory=list)


@dataclass
class RunRecord:
    """One run.

    Attributes:
        outcome: "ok", "failed", "interrupted"; empty when the log has no end, because the driver
            was killed or still runs.
        started, ended, last: Unix seconds of the first event, the end, and the last event.
        steps: by key, inputs first.
        torn: lines of the log that could not be read.
    """

    run: str
    store: str = ""
    command: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    started: float = 0.0
    ended: float | None = None
    last: float = 0.0
    outcome: str = ""
    steps: dict[str, StepRecord] = field(default_factory=dict)
    torn: int = 0

    @property
    def wall(self) -> float:
        """Seconds from the first event to the end, or to the last event when there is no end."""
        return max(0.0, (self.ended if self.ended is not None else self.last) - self.started)

    @property
    def saved(self) -> float:
        """Seconds that building the reused outputs took, once, when they were built."""
        return sum(step.seconds or 0.0 for step in self.among("reused", "elsewhere"))

    def among(self, *states: str) -> list[StepRecord]:
        """Steps in any of these states, inputs first."""
        return [step for step in self.steps.values() if step.state in states]


@dataclass(frozen=True)
class RunSummary:
    """A run in the table of runs, and what other runs' pages need to link to it.

    Attributes:
        executed, reused, failed: keys of steps.
        page: whether its page has been written.
    """

    run: str
    command: tuple[str, ...]
    started: float
    wall: float
    outcome: str
    executed: frozenset[str]
    reused: frozenset[str]
    failed: frozenset[str]
    page: bool = False


def read(prefix: str, run_id: str) -> RunRecord:
    """The record of one run.

    Args:
        prefix: the store.
        run_id: name of the log in the store, without its ending.

    Raises:
        FileNotFoundError: when the store has no log of that run.
    """
    url = _url(prefix, run_id)
    if not storage.exists(url):
        raise FileNotFoundError(url)
    return _fold(run_id, _lines(Tail(url).more()))


def runs(prefix: str, newest: int = 100) -> list[RunSummary]:
    """Summaries of the runs in a store, newest first.

    Progress is not parsed but for the last line's time, and older runs than the `newest` (by name,
    which starts with the date) are not read, so that a store with years of runs stays quick to
    look at.
    """
    logs = [n for n in storage.list_names(storage.join(prefix, "events")) if n.endswith(".jsonl")]
    names = [name.removesuffix(".jsonl") for name in logs]
    pages = set(storage.list_names(storage.join(prefix, "reports")))

    def summary(name: str) -> RunSummary:
        lines = list(_lines(Tail(_url(prefix, name)).more()))
        told = [x for x in lines if not any(mark in x for mark in _DETAILS)]
        record = _fold(name, told)
        if record.started and record.ended is None:
            # The last thing heard of a killed run is a detail as a rule.
            record.last = max(record.last, _last(lines))
        return summarise(record, page=f"{name}.html" in pages)

    # Threads: on an object store each log is a round trip.
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(summary, sorted(names, reverse=True)[:newest]))
    return sorted(found, key=lambda s: (s.started, s.run), reverse=True)


def summarise(record: RunRecord, page: bool = True) -> RunSummary:
    """What the table of runs says about a run."""

    def keys(*states: str) -> frozenset[str]:
        return frozenset(step.key for step in record.among(*states))

    return RunSummary(
        record.run,
        tuple(record.command),
        record.started,
        record.wall,
        record.outcome,
        executed=keys("executed"),
        reused=keys("reused", "elsewhere"),
        failed=keys("failed"),
        page=page,
    )


def _url(prefix: str, run_id: str) -> str:
    return storage.join(prefix, "events", f"{run_id}.jsonl")


def _lines(data: bytes) -> Iterator[bytes]:
    return (line for line in data.split(b"\n") if line.strip())


def _last(lines: list[bytes]) -> float:
    """When the last line that can be read was written; 0 when none can."""
    for line in reversed(lines):
        try:
            return float(json.loads(line)["time"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0.0


def _fold(run_id: str, lines: Iterable[bytes]) -> RunRecord:
    record = RunRecord(run_id)
    for line in lines:
        try:
            event = json.loads(line)
            kind, now = event["event"], float(event["time"])
        except (ValueError, KeyError, TypeError):
            record.torn += 1
            continue
        record.started = record.started or now
        record.last = max(record.last, now)
        if kind == "run_started":
            _start(record, event)
        elif kind == "run_finished":
            record.ended, record.outcome = now, event.get("outcome", "ok")
        elif "key" in event:
            label = str(event.get("step", "?"))
            step = record.steps.setdefault(event["key"], StepRecord(label, event["key"]))
            _apply(step, kind, event, now)
    _close(record)
    return record


def _start(record: RunRecord, event: dict[str, Any]) -> None:
    record.started = float(event["time"])
    record.store = event.get("store") or ""
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
    if kind == "hit":
        step.origin = event.get("origin") or ""
        step.state = "elsewhere" if step.origin else "reused"
        step.seconds = event.get("seconds")
    elif kind == "queued":
        step.state, step.queued = "waiting", now
        step.reason = event.get("reason") or ""
    elif kind == "waiting":
        step.state = "waiting"
        step.reason = f"waiting for {event.get('holder')}, which runs it already"
    elif kind == "started":
        _end(step, now, "stopped", "no end was reported")
        step.state, step.log = "running", event.get("log") or ""
        step.attempts.append(Attempt(event.get("attempt") or "", step.log, now))
    elif kind == "progress":
        amount = f"{event.get('done') or 0:,.0f} of {event.get('total') or 0:,.0f}"
        step.progress = f"{amount} {event.get('unit') or ''}".rstrip()
        step.note = event.get("note") or ""
    elif kind == "shard":
        step.shards += 1
        step.shard_bytes += event.get("bytes") or 0
    elif kind == "warning":
        step.warnings.append(str(event.get("message", "")))
    elif kind == "retried":
        step.state, step.cause = "waiting", event.get("cause") or ""
        _end(step, now, "retried", step.cause)
    elif kind == "finished":
        _finish(step, event, now)
    elif kind == "failed":
        step.state, step.cause, step.ended = "failed", event.get("cause") or "", now
        step.log = event.get("log") or step.log
        _end(step, now, "failed", step.cause)


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
            # Workers stamp their own events, and clocks differ.
            attempt.ended = max(now, attempt.started)
            attempt.status, attempt.cause = status, cause


def _close(record: RunRecord) -> None:
    """A run that has ended left nothing running, and nothing waits for its turn any more."""
    if record.ended is None:
        return
    for step in record.among("waiting"):
        step.state = "stopped" if step.attempts else "unreached"
    for step in record.among("running"):
        step.state = "stopped"
        _end(step, record.ended, "stopped", "the run ended")
