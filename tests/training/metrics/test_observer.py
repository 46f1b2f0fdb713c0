"""A run under observation: everything is written, and it is the run that nobody looked at."""

import dataclasses
import json
import sys
import threading
import time
from unittest import mock

import jax
import pytest

from tests.training import tiny
from training.checkpoint.restore import load_model
from training.evaluate.evaluator import Evaluator
from training.metrics.goodput import account
from training.metrics.journal import read_journals
from training.metrics.observer import Observer
from training.metrics.stopwatch import BUCKETS, Stopwatch
from training.metrics.trackers import outlets
from training.metrics.trackers.backends import open_backend
from training.metrics.trackers.files import join_attempts, read_lines
from training.metrics.trackers.outlets import Outlet
from training.trainer.trainer import train


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with the tiny run's token shards."""
    directory = str(tmp_path_factory.mktemp("data"))
    tiny.write_data(directory)
    return directory


def job(root, home, attempt, **changes):
    given = {"profile": None, **changes.pop("train", {})}
    return tiny.make_job(
        root,
        train=dataclasses.replace(tiny.TRAIN, checkpoint_every=2, **given),
        attempt=attempt,
        checkpoint_directory=f"{home}/checkpoints",
        journal_directory=f"{home}/journal",
        run_directory=f"{home}/runs/{attempt}",
        **changes,
    )


def run(work):
    committed = []
    result = train(
        work,
        on_commit=lambda step, path: committed.append((step, path)),
        devices=jax.devices()[:1],
    )
    return result, committed


def lines(home, attempt, kind):
    entries = read_lines(f"{home}/runs/{attempt}/metrics.jsonl")
    return [each for each in entries if each["kind"] == kind]


def plain(row):
    return {name: value for name, value in row.items() if name not in ("kind", "time")}


@pytest.mark.slow
def test_two_attempts_leave_one_account_and_one_history(root, tmp_path):
    """The second goes on from step 4 of the first's six; lines, buckets and marks agree."""
    first, committed = run(job(root, tmp_path, "a"))
    second, _ = run(job(root, tmp_path, "b", resume_from=tuple(committed[:2])))
    assert [step for step, _ in committed] == [2, 4, 6]
    rows = join_attempts([(0, lines(tmp_path, "a", "step")), (4, lines(tmp_path, "b", "step"))])
    assert [plain(row) for row in rows] == second.history
    assert [each["step"] for each in lines(tmp_path, "a", "evaluation")] == [0, 4, 6]
    assert lines(tmp_path, "a", "config")[0]["train"]["steps"] == 6
    journals = read_journals(f"{tmp_path}/journal")
    assert [(j.attempt, j.first_step, j.last_step, j.outcome) for j in journals] == [
        ("a", 0, 6, "finished"),
        ("b", 4, 6, "finished"),
    ]
    assert [mark.step for mark in journals[0].marks] == [2, 4, 6]
    for journal, result in zip(journals, (first, second), strict=True):
        assert set(result.seconds) == {*BUCKETS, "total"}
        assert 0 <= journal.seconds - result.seconds["total"] < 5
        waited = sum(row["data_wait"] for row in result.history[journal.first_step :])
        assert journal.buckets["data_wait"] == pytest.approx(waited, abs=1e-6)
        for bucket in ("init", "step", "evaluation", "checkpoint"):
            assert journal.buckets[bucket] > 0, bucket
    found = account(journals)
    assert found.parts["redone"] > 0
    assert sum(found.parts.values()) == pytest.approx(found.total)


class Breaks:
    """A tracker that fails at once, and at the end."""

    def write(self, entries):
        raise RuntimeError("quota")

    def close(self):
        raise RuntimeError("quota")

    def abandon(self):
        raise RuntimeError("quota")


@pytest.mark.slow
def test_observation_changes_no_bit(root, tmp_path, monkeypatch):
    """With a broken tracker, a profile and a journal the parameters are those of a run without."""
    monkeypatch.setattr(outlets, "ChildTracker", lambda name, context: Breaks())
    monkeypatch.setattr(Outlet.__init__, "__defaults__", (10_000, 0.005))
    watched, _ = run(job(root, tmp_path, "a", train={"trackers": ("wandb",), "profile": (3, 2)}))
    bare = tiny.make_job(
        root,
        train=dataclasses.replace(tiny.TRAIN, checkpoint_every=2),
        checkpoint_directory=f"{tmp_path}/bare",
    )
    unwatched, _ = run(bare)
    assert tiny.learned(watched.history) == tiny.learned(unwatched.history)
    both = [load_model(result.checkpoint, tiny.MODEL) for result in (watched, unwatched)]
    assert tiny.equal(*both)
    traces = list((tmp_path / "runs" / "a" / "traces" / "step-00000003").rglob("*.xplane.pb"))
    assert traces
    assert watched.seconds["other"] > unwatched.seconds["other"]


class Closes(Breaks):
    """Takes everything, and fails at the end."""

    def write(self, entries):
        pass


class Quiet(Closes):
    """Takes everything, and ends."""

    def close(self):
        pass


@pytest.mark.parametrize("tracker", [Breaks, Closes])
@pytest.mark.parametrize("deaf", [False, True])
def test_a_tracker_that_fails_is_told_once_and_in_the_thread_of_the_loop(
    root, tmp_path, monkeypatch, tracker, deaf
):
    """While rows come or at the end; whoever is told may fail as well."""
    told = []

    def warn(line):
        told.append((line, threading.current_thread()))
        if deaf:
            raise RuntimeError("nobody listens")

    monkeypatch.setattr(outlets, "ChildTracker", lambda name, context: tracker())
    monkeypatch.setattr(Outlet.__init__, "__defaults__", (10_000, 0.005))
    work = job(root, tmp_path, "a", train={"trackers": ("wandb",)})
    observer = Observer(work, Stopwatch(), warn=warn)
    observer.began(0)
    if tracker is Breaks:
        while not observer._trackers.failures:
            time.sleep(0.001)
        assert told == [], "not from the tracker's thread"
    for step in (1, 2, 3):
        observer.row({"step": step, "loss": 1.0})
        assert len(told) == (tracker is Breaks)
    observer.close("finished")
    line = "tracker wandb is off, the run continues without it: RuntimeError: quota"
    assert told == [(line, threading.current_thread())]
    assert [row["step"] for row in lines(tmp_path, "a", "step")] == [1, 2, 3]


@pytest.mark.parametrize(("library", "keyword"), [("wandb", "id"), ("trackio", "name")])
def test_a_run_built_anew_is_another_run_to_services(root, tmp_path, monkeypatch, library, keyword):
    """Attempts at one build go on with its run; they never add to the run that it replaces."""
    module = mock.MagicMock()
    monkeypatch.setitem(sys.modules, library, module)
    contexts = []
    monkeypatch.setattr(
        outlets, "ChildTracker", lambda _, context: contexts.append(context) or Quiet()
    )
    monkeypatch.setattr(Outlet.__init__, "__defaults__", (10_000, 0.005))
    for build, attempt in (("0a1b", "a"), ("0a1b", "b"), ("2c3d", "a"), ("", "a")):
        work = dataclasses.replace(
            job(root, tmp_path, attempt, train={"trackers": (library,)}),
            name="train-1234",
            journal_directory=build and f"{tmp_path}/journal/{build}",
        )
        Observer(work, Stopwatch()).close("finished")
        open_backend(library, dataclasses.asdict(contexts[-1]))
    found = [call.kwargs[keyword] for call in module.init.call_args_list]
    assert found == ["train-1234-0a1b", "train-1234-0a1b", "train-1234-2c3d", "train-1234"]


@pytest.mark.slow
def test_a_run_that_fails_says_so_in_its_journal(root, tmp_path, monkeypatch):
    """Whatever ended it."""
    monkeypatch.setattr(Evaluator, "__call__", lambda *_: json.loads("no json"))
    with pytest.raises(ValueError, match="Expecting"):
        run(job(root, tmp_path, "a"))
    (journal,) = read_journals(f"{tmp_path}/journal")
    assert journal.outcome == "failed"
