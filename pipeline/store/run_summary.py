"""The summary of a run: one object beside its event log, which its driver writes again and again.

It has what the events said so far, how many bytes of the log those are, and which process the
driver is; each new write of it is a heartbeat of the run. The first is written before the run looks
at any output, so that garbage collection leaves alone what the run may read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.events import encode as encode_json
from pipeline.store import process, storage
from pipeline.store.parallel import concurrently

BEAT_SECONDS = 60.0
_SILENT_BEATS = 5  # a driver is lost after so many: one write may be retried for 90 s
_FIRST_LINES = 3  # lines of an event log that contain the run_started event
_RUN_STARTED = b'"run_started"'
_LOG, _SUMMARY = ".jsonl", ".json"


def log_url(prefix: str, run: str) -> str:
    return storage.join(prefix, "events", run + _LOG)


def summary_url(prefix: str, run: str) -> str:
    return storage.join(prefix, "events", run + _SUMMARY)


def run_ids(prefix: str) -> dict[str, bool]:
    """The runs in a store, and whether each has a summary, by one listing; sorted by id."""
    names = dict.fromkeys(storage.list_names(storage.join(prefix, "events")), 1.0)
    return {run: time > 0 for run, time in sorted(written(names).items())}


def written(names: Mapping[str, float]) -> dict[str, float]:
    """The runs of an `events` directory by its names, and when their summaries were written.

    0 for a run without a summary.
    """
    ids = {n.removesuffix(end) for end in (_LOG, _SUMMARY) for n in names if n.endswith(end)}
    return {run: names.get(run + _SUMMARY, 0.0) for run in ids}


def load_summary(prefix: str, run: str) -> dict[str, Any]:
    try:
        found = json.loads(storage.read_bytes(summary_url(prefix, run)))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def encode(record: Any, read: int) -> bytes:
    """The summary that a driver writes: a record, which the first `read` bytes of its log say."""
    summary = {"process": process.this(), "read": read, "record": record}
    return encode_json(summary)


def save(prefix: str, run: str, summary: bytes) -> None:
    storage.write_atomic(summary_url(prefix, run), summary, durable=False)


def lives(prefix: str, run: str, driver: dict[str, Any], age: float | None = None) -> bool:
    """Whether the driver of a run lives: on this host by its process, elsewhere by the summary.

    `age` are the seconds since that was written; without it the store is asked, by a small write.
    """
    if process.is_here(driver):
        return not process.is_gone(driver)
    age = process.age(summary_url(prefix, run)) if age is None else age
    return age is None or age <= _SILENT_BEATS * BEAT_SECONDS


def recorded(prefix: str, *, live: bool = False) -> set[str]:
    """Directories of all outputs in the graphs of a store's runs, or only of `live` ones."""

    def directories(run: tuple[str, bool]) -> set[str]:
        name, summarised = run
        summary = load_summary(prefix, name) if summarised else {}
        if live:
            return _summarised(summary) if _goes_on(prefix, name, summary) else set()
        return _summarised(summary) or _started(log_url(prefix, name))

    return set().union(*concurrently(directories, run_ids(prefix).items(), prefix))


def _goes_on(prefix: str, run: str, summary: dict[str, Any]) -> bool:
    try:
        return not summary["record"]["outcome"] and lives(prefix, run, dict(summary["process"]))
    except (KeyError, TypeError, ValueError):
        return False


def _summarised(summary: dict[str, Any]) -> set[str]:
    try:
        return {str(step["directory"]) for step in summary["record"]["steps"].values()} - {""}
    except (KeyError, TypeError, AttributeError):
        return set()


def _started(url: str) -> set[str]:
    parts = [] if storage.is_local(url) else storage.list_names(url)
    found: set[str] = set()
    try:
        with storage.open_read(storage.join(url, *parts[:1])) as file:
            lines = [file.readline() for _ in range(_FIRST_LINES)]
    except FileNotFoundError:
        return found
    for line in lines:
        if _RUN_STARTED in line:
            try:
                found |= {str(node["directory"]) for node in json.loads(line)["graph"]}
            except (ValueError, KeyError, TypeError):
                continue  # a truncated line
    return found
