"""A run read back from its log: states, attempts, torn and endless logs, summaries."""

from __future__ import annotations

import pytest

from pipeline.errors import InputError
from pipeline.pages import record as run_record
from pipeline.store import storage
from tests.pipeline import helpers, toy
from tests.pipeline.execute import run_logs
from tests.pipeline.execute.run_logs import START, Log, key, node

RUN = "20260921-120000-aaaaaa"


def states(record):
    return {step.label: step.state for step in record.steps.values()}


def test_the_states_of_a_failed_run(tmp_path):
    """Every kind of step of a run with a retry, a failure and reuse, and the sums over them."""
    run_logs.troubled_run(str(tmp_path))
    record = run_record.read(str(tmp_path), RUN)
    assert states(record) == {
        "documents": "reused",
        "train_tokenizer": "elsewhere",
        "tokenize_train": "executed",
        "tokenize_validation": "executed",
        "corpus_statistics": "reused",
        "train": "executed",
        "evaluate": "failed",
        "sample": "unreached",
        "export": "unreached",
        "report": "unreached",
    }
    assert record.outcome == "failed"
    assert record.saved == 41.0 + 12.5 + 3.0
    assert record.wall == pytest.approx(2 + 1 + 3 + 4 + 85 + 1 + 60 + 5 + 175 + 1 + 20 + 0.5)
    assert record.steps[key("tokenize_validation")].warnings == ["3 documents were <empty>"]
    assert record.steps[key("tokenize_validation")].shard_bytes == 1_700_000


def test_attempts_of_a_retried_step(tmp_path):
    """Both tries, with their times, ends and causes."""
    run_logs.troubled_run(str(tmp_path))
    first, second = run_record.read(str(tmp_path), RUN).steps[key("train")].attempts
    assert (first.name, first.status, first.cause) == (
        "000001-aaaa",
        "retried",
        "its worker died: SIGKILL",
    )
    assert first.ended is not None
    assert first.ended - first.started == 60
    assert (second.name, second.status) == ("000002-bbbb", "published")
    assert second.started - first.ended == 5


def test_a_torn_last_line_costs_only_itself(tmp_path):
    """At whatever byte the last line is cut, the lines before it are read as they are."""
    log = run_logs.clean_run(str(tmp_path), "whole", START, reused=8)
    *rest, last = storage.read_bytes(log.url).splitlines(keepends=True)
    expected = None
    for cut in range(1, len(last) - 1, 7):
        storage.write_atomic(log.url, b"".join(rest) + last[:cut])
        record = run_record.read(str(tmp_path), "whole")
        assert (record.torn, record.outcome) == (1, "")
        expected = expected or states(record)
        assert states(record) == expected
    assert sorted(expected.values()) == ["executed"] * 2 + ["reused"] * 8


def test_garbage_is_counted_and_skipped(tmp_path):
    """Bytes that are no UTF-8, JSON that is no event, and unknown events; not empty lines."""
    log = Log(str(tmp_path), "odd").start([node("documents")])
    with open(log.url, "ab") as file:
        file.write(
            b'\xff\xfe{\n[1, 2]\n"text"\n\n{"event": "hit"}\n{"time": "x", "event": "hit"}\n'
        )
    log.tell("invented_later", "documents", more={"a": 1}).tell("hit", "documents", seconds=2.0)
    record = run_record.read(str(tmp_path), "odd")
    assert record.torn == 6
    assert states(record) == {"documents": "reused"}


def test_a_killed_run_has_no_outcome(tmp_path):
    """Without an end, what ran still counts as running, until the last thing heard."""
    log = Log(str(tmp_path), "killed").start(run_logs.graph())
    log.tell("queued", "documents").tell("queued", "train").at(1).began("documents").at(30)
    log.tell("progress", "documents", done=1200, total=5000, unit="files", note="slow")
    record = run_record.read(str(tmp_path), "killed")
    assert (record.outcome, record.ended, record.wall) == ("", None, 31.0)
    found = states(record)
    assert (found["documents"], found["train"], found["report"]) == (
        "running",
        "waiting",
        "unneeded",
    )
    step = record.steps[key("documents")]
    assert step.progress == "1,200 of 5,000 files, slow"


def test_an_interrupted_run_leaves_nothing_running(tmp_path):
    """An end without the step's own end stops it."""
    log = Log(str(tmp_path), "stopped").start([node("documents")]).began("documents").at(9)
    log.tell("run_finished", outcome="interrupted", executed=[])
    step = run_record.read(str(tmp_path), "stopped").steps[key("documents")]
    assert step.state == "stopped"
    assert [(a.status, a.ended) for a in step.attempts] == [("stopped", START + 9)]


def test_waiting_for_another_run_counts_as_reuse(tmp_path):
    """A step that another driver published while this one waited was not executed here."""
    log = Log(str(tmp_path), "shared").start([node("documents")]).tell("queued", "documents")
    log.tell("waiting", "documents", holder="process 7 on north")
    step = run_record.read(str(tmp_path), "shared").steps[key("documents")]
    assert (step.state, step.reason) == (
        "waiting",
        "waiting for process 7 on north, which is already building it",
    )
    log.at(5).tell("finished", "documents", seconds=0.0, status="reused", result={})
    record = run_record.read(str(tmp_path), "shared")
    assert states(record) == {"documents": "reused"}
    assert record.steps[key("documents")].attempts == []


def test_the_log_of_a_real_run_without_a_graph(tmp_path):
    """Steps are found from their events alone; counts are the executor's own."""
    numbers = toy.numbers(count=8)
    wanted = toy.total(numbers, toy.scaled(numbers, scale=toy.Scale(3)))
    first = helpers.bring_up(str(tmp_path), numbers)
    storage.delete_tree(storage.join(str(tmp_path), "events", "test.jsonl"))
    second = helpers.bring_up(str(tmp_path), wanted)
    record = run_record.read(str(tmp_path), "test")
    assert len(first.executed) == 1
    assert {s.key for s in record.among("executed")} == {n.key for n in second.executed}
    assert {s.key for s in record.among("reused")} == {n.key for n in first.executed}
    assert all(step.attempts[0].status == "published" for step in record.among("executed"))
    assert record.steps[second.executed[-1].key].result["total"] == sum(range(8)) * 4


def test_runs_are_summarised_newest_first(tmp_path):
    """What was executed and reused in each, which have a page, and not more than asked for."""
    prefix = str(tmp_path)
    run_logs.clean_run(prefix, "20260901-000000-a", START, reused=0)
    run_logs.clean_run(prefix, "20260902-000000-b", START + 5000, reused=7)
    run_logs.troubled_run(prefix, "20260903-000000-c")
    storage.write_atomic(storage.join(prefix, "reports", "20260902-000000-b.html"), b"x")
    found = run_record.runs(prefix)
    assert [s.run[-1] for s in found] == ["b", "c", "a"]
    assert [s.page for s in found] == [True, False, False]
    states = (["executed"], ["reused", "elsewhere"], ["failed"])
    assert [tuple(len(run.among(*each)) for each in states) for run in found] == [
        (3, 7, 0),
        (3, 3, 1),
        (10, 0, 0),
    ]
    assert [s.run[-1] for s in run_record.runs(prefix, newest=1)] == ["c"]
    assert run_record.runs(str(tmp_path / "nowhere")) == []


def test_a_killed_run_lasted_until_its_last_detail(tmp_path):
    """Its summary is as long as its record, whole and with a torn last line."""
    log = Log(str(tmp_path), "killed").start([node("documents")]).at(1).began("documents").at(30)
    log.tell("progress", "documents", done=1, total=2, unit="files", note="")
    for torn in ("", '{"time": 9e9, "event": "prog'):
        with open(log.url, "a") as file:
            file.write(torn)
        (summary,) = run_record.runs(str(tmp_path))
        assert summary.wall == run_record.read(str(tmp_path), "killed").wall == 31.0


def test_no_such_run(tmp_path):
    """Reading a run that never was is an error, and a name cannot leave the store."""
    with pytest.raises(FileNotFoundError):
        run_record.read(str(tmp_path), "never")
    with pytest.raises(InputError, match="plain relative path"):
        run_record.read(str(tmp_path), "../../secret")


def test_a_log_in_parts_is_one_run(tmp_path):
    """On an object store a log is a folder of what was appended, cut anywhere."""
    run, store = "20260921-120000-aaaaaa", f"memory://{tmp_path.name}"
    log = Log(str(tmp_path), run).start([node("documents")]).began("documents").at(9)
    log.tell("finished", "documents", seconds=9.0, status="published")
    written = storage.read_bytes(log.url)
    for number, part in enumerate((written[:70], written[70:])):
        url = storage.join(store, "events", f"{run}.jsonl", f"{number + 1:06d}.txt")
        storage.write_atomic(url, part)
    assert states(run_record.read(store, run)) == {"documents": "executed"}
    assert len(run_record.runs(store)) == 1


def test_what_a_driver_says_of_the_run_is_kept(tmp_path):
    """Commit, configuration, reasons as text or as lines, and the cause of its end."""
    entry = {**node("train"), "config": {"steps": 8}}
    log = Log(str(tmp_path), "said").tell("run_started", graph=[entry])
    log.tell("provenance", git={"commit": "abc"})
    log.tell("queued", "train", reason=["train.steps: 4 -> 8", "code changed"])
    log.tell("run_finished", outcome="failed", cause="no room on /tmp")
    record = run_record.read(str(tmp_path), "said")
    step = record.steps[key("train")]
    assert (record.commit, record.cause) == ("abc", "no room on /tmp")
    assert (step.config, step.reason) == ({"steps": 8}, "train.steps: 4 -> 8; code changed")
