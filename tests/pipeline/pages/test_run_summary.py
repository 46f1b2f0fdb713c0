"""The summary of a run: who lives, and what readers need not read again."""

from __future__ import annotations

import json
import os
import time

import pytest

from pipeline.pages import record as run_record
from pipeline.pages.record import Follower
from pipeline.store import process, run_summary, storage
from tests.pipeline.execute.run_logs import Log, key, node, summarise

LONG_AGO = time.time() - 5000


def _upload(log: Log, store: str, cut: int) -> None:
    """Copy a log to an object store, `cut` lines a part."""
    lines = storage.read_bytes(log.url).splitlines(keepends=True)
    for first in range(0, len(lines), cut):
        url = f"{run_summary.log_url(store, log.run)}/{first // cut + 1:06d}.txt"
        storage.write_atomic(url, b"".join(lines[first : first + cut]))


def _counted(monkeypatch) -> list[str]:
    read, seen = storage.read_bytes, []
    monkeypatch.setattr(storage, "read_bytes", lambda url: (seen.append(url), read(url))[1])
    return seen


@pytest.mark.slow
def test_a_look_reads_the_summary_and_what_was_appended_since(tmp_path, monkeypatch):
    """Of a thousand parts a few; of a run that has ended none."""
    store = f"memory://{tmp_path.name}-summary"
    log = Log(str(tmp_path), "long").start([node("train")]).began("train")
    for done in range(1000):
        log.at(10).tell("progress", "train", done=done, total=5000, unit="steps", note="")
    _upload(log, store, 1)
    summarise(store, "long")
    for done in range(1000, 1003):
        log.at(10).tell("progress", "train", done=done, total=5000, unit="steps", note="")
    _upload(log, store, 1)
    seen = _counted(monkeypatch)
    for find in (lambda: run_record.read(store, "long"), lambda: run_record.runs(store)[0]):
        seen.clear()
        found = find()
        assert found.steps[key("train")].progress == "1,002 of 5,000 steps"
        assert [len(step.attempts) for step in found.steps.values()] == [1]
        assert len(seen) == 4
    follower = Follower(store, "long")
    follower.look()
    log.tell("finished", "train", seconds=1.0).tell("run_finished", outcome="ok")
    _upload(log, store, 1)
    seen.clear()
    assert follower.look().outcome == "ok"
    assert len(seen) == 2
    summarise(store, "long")
    seen.clear()
    assert run_record.runs(store)[0].steps == run_record.read(store, "long").steps
    assert seen == [run_summary.summary_url(store, "long")] * 2


def test_what_runs_used_is_one_small_read_each(tmp_path, monkeypatch):
    """From the summary, or from the beginning of the log of a run without one."""
    store = f"memory://{tmp_path.name}-recorded"
    for run, label in (("new", "train"), ("old", "report"), ("odd", "export")):
        log = Log(str(tmp_path), run).start([node(label)])
        for _ in range(20):
            log.tell("progress", label, done=1, total=2, unit="steps", note="")
        _upload(log, store, 1)
    summarise(store, "new")
    storage.write_atomic(run_summary.summary_url(store, "odd"), b'{"record": {"steps": [7]')
    opened, open_read = _counted(monkeypatch), storage.open_read
    monkeypatch.setattr(storage, "open_read", lambda u: (opened.append(u), open_read(u))[1])
    wanted = {node(label)["directory"] for label in ("train", "report", "export")}
    assert run_summary.recorded(store) == wanted
    assert len(opened) == 4


@pytest.mark.parametrize(
    "summary", [b"", b"[]", b"{", b'{"record": 7}', b'{"read": 1, "record": {"steps": 1}}']
)
def test_a_summary_that_cannot_be_read_costs_nothing(tmp_path, summary):
    """The log has everything."""
    log = Log(str(tmp_path), "run").start([node("train")]).began("train")
    storage.write_atomic(run_summary.summary_url(str(tmp_path), "run"), summary)
    log.tell("run_finished", outcome="failed")
    (found,) = run_record.runs(str(tmp_path))
    assert (found.outcome, list(found.steps)) == ("failed", [key("train")])


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path):
    """Once, also by who begins at a summary written in between."""
    log = Log(str(tmp_path), "run").start([node("train")])
    reader = Follower(str(tmp_path), "run")
    line = json.dumps({"time": 1.0, "event": "started", "key": key("train"), "attempt": "1"})
    with open(log.url, "a") as file:
        file.write(line[:20])
    summarise(str(tmp_path), "run")
    assert reader.look().torn == 1
    with open(log.url, "a") as file:
        file.write(f"{line[20:]}\n")
    for found in (reader.look(), run_record.read(str(tmp_path), "run")):
        assert (found.torn, len(found.steps[key("train")].attempts)) == (0, 1)


def test_a_quiet_run_lives_as_long_as_its_driver(tmp_path, monkeypatch):
    """On its host by its process; elsewhere by its heartbeat, whatever any clock says."""
    store = str(tmp_path)
    Log(store, "quiet", LONG_AGO).start([node("train")]).began("train")
    assert run_record.runs(store)[0].ending == "killed (no exit record)"
    summarise(store, "quiet")
    assert run_record.runs(store)[0].ending == "running"
    monkeypatch.setattr(process, "this_host", lambda: "elsewhere")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 5000)
    assert run_record.runs(store)[0].ending == "running"
    url = run_summary.summary_url(store, "quiet")
    os.utime(url, (0, os.stat(url).st_mtime - 10 * run_summary.BEAT_SECONDS))
    assert run_record.runs(store)[0].ending == "killed (no exit record)"
