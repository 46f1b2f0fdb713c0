"""A run under observation: everything is written, and it is the run that nobody looked at."""

import contextlib
import dataclasses
import json
import os
import re
import sys
import threading
from unittest import mock

import pytest

from tests.training import tiny
from training.checkpoint.restore import load_model
from training.evaluate.evaluator import Evaluator
from training.metrics.goodput import account, read_attempts
from training.metrics.metrics_log import MetricsLog, plain, read_log
from training.metrics.stopwatch import BUCKETS, STARTUP
from training.metrics.trackers import BACKENDS, Trackers, sample_name
from training.trainer.run_context import run_context, tracker_context


def job(data, home, attempt, **changes):
    given = {"profile": None, **changes.pop("train", {})}
    return tiny.make_job(
        data,
        train=dataclasses.replace(tiny.TRAIN, checkpoint_every=2, **given),
        attempt=attempt,
        checkpoint_directory=f"{home}/checkpoints",
        run_directory=f"{home}/runs/{attempt}",
        **changes,
    )


def run(work):
    heard = tiny.Heard()
    result = tiny.run(work, heard)
    return result, heard.committed


def lines(home, attempt, kind):
    return [each for each in read_log(f"{home}/runs/{attempt}") if each["kind"] == kind]


@pytest.mark.slow
def test_two_attempts_leave_one_account_and_one_history(data, tmp_path):
    """The second goes on from step 4 of the first's six; lines, buckets and marks agree."""
    first, committed = run(job(data, tmp_path, "a"))
    second, _ = run(job(data, tmp_path, "b", resume_from=tuple(committed[:2])))
    assert [step for step, _ in committed] == [2, 4, 6]
    rows = [*lines(tmp_path, "a", "step")[:4], *lines(tmp_path, "b", "step")]
    assert [plain(row) for row in rows] == tiny.rows(second)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in lines(tmp_path, "a", "step")] == [1, 2, 3, 4, 5, 6]
    assert [each["step"] for each in lines(tmp_path, "a", "evaluation")] == [0, 4, 6]
    assert lines(tmp_path, "a", "config")[0]["train"]["steps"] == 6
    attempts = read_attempts(f"{tmp_path}/runs/{name}" for name in "ab")
    assert [(a.attempt, a.first_step, a.last_step, a.outcome) for a in attempts] == [
        ("a", 0, 6, "finished"),
        ("b", 4, 6, "finished"),
    ]
    assert [mark.step for mark in attempts[0].marks] == [2, 4, 6]
    for attempt, result in zip(attempts, (first, second), strict=True):
        assert (attempt.device, attempt.devices, attempt.processes) == ("cpu", 1, 1)
        assert set(result.seconds) == {*BUCKETS, "total"}
        assert 0 <= attempt.seconds - result.seconds["total"] < 5
        waited = sum(row["data_wait"] for row in tiny.rows(result)[attempt.first_step :])
        assert attempt.buckets["data_wait"] == pytest.approx(waited, abs=1e-6)
        for bucket in ("init", "step", "evaluation", "checkpoint"):
            assert attempt.buckets[bucket] > 0, bucket
        assert list(attempt.startup) == [part for part in STARTUP if part in attempt.startup]
        assert {"restoring", "first batch", "first step"} <= attempt.startup.keys()
    found = account(attempts)
    assert found.parts["redone"] > 0
    assert sum(found.parts.values()) == pytest.approx(found.total)


FAILS = (sys.executable, "-c", "import sys; sys.exit('quota')")


@pytest.mark.slow
def test_observation_changes_no_bit(data, tmp_path, monkeypatch):
    """With a broken tracker and a profile the parameters are those of a run without."""
    monkeypatch.setattr(Trackers.__init__, "__defaults__", (FAILS,))
    watched, _ = run(job(data, tmp_path, "a", train={"trackers": ("wandb",), "profile": (3, 2)}))
    bare = tiny.make_job(
        data,
        train=dataclasses.replace(tiny.TRAIN, checkpoint_every=2),
        checkpoint_directory=f"{tmp_path}/bare",
    )
    unwatched, _ = run(bare)
    assert tiny.learned(tiny.rows(watched)) == tiny.learned(tiny.rows(unwatched))
    both = [load_model(result.checkpoint, tiny.MODEL) for result in (watched, unwatched)]
    assert tiny.equal(*both)
    traces = list((tmp_path / "runs" / "a" / "traces" / "step-00000003").rglob("*.xplane.pb"))
    assert traces


@pytest.mark.parametrize("deaf", [False, True])
def test_a_tracker_that_fails_is_reported_once_and_in_the_thread_of_the_loop(
    data, tmp_path, monkeypatch, deaf
):
    """Whoever hears of it may fail as well; the metrics log has every row."""
    told = []

    def event(kind, reason):
        told.append((kind, reason, threading.current_thread()))
        if deaf:
            raise RuntimeError("nobody listens")

    monkeypatch.setattr(Trackers.__init__, "__defaults__", (FAILS,))
    work = job(data, tmp_path, "a", train={"trackers": ("wandb",)})
    with run_context(work, tiny.Heard(event=event)) as context:
        context.began(0)
        context._trackers._children["wandb"].wait(20)
        assert told == []
        for step in (1, 2, 3):
            context.row({"step": step, "loss": 1.0})
            assert len(told) == 1
        context.end(preempted=False)
    line = "tracker wandb is off, the run continues without it: quota"
    assert told == [("tracker", line, threading.current_thread())]
    assert [row["step"] for row in lines(tmp_path, "a", "step")] == [1, 2, 3]


def test_a_tracker_that_starts_late_reads_a_run_in_a_store(data, tmp_path, monkeypatch):
    """Whose local copy of the log is deleted only once the tracker has read it."""
    out = tmp_path / "read"
    code = (
        "import json, sys; context = json.loads(sys.stdin.buffer.readline()); "
        f"sys.stdin.buffer.read(); open({str(out)!r}, 'w').write(open(context['path']).read())"
    )
    monkeypatch.setattr(Trackers.__init__, "__defaults__", ((sys.executable, "-c", code),))
    work = job(data, "memory://late", "a", train={"trackers": ("wandb",)})
    with run_context(work) as context:
        context.began(0)
        context.row({"step": 1, "loss": 1.0})
        context.end(preempted=False)
    assert [json.loads(line)["kind"] for line in out.read_text().splitlines()] == [
        "config",
        "time",
        "began",
        "step",
    ]
    assert not os.path.exists(context.log.path)


@pytest.mark.parametrize(("library", "keyword"), [("wandb", "id"), ("trackio", "name")])
def test_a_run_built_anew_is_another_run_to_services(data, tmp_path, monkeypatch, library, keyword):
    """Attempts at one build continue its run; they never add to the run that it replaces."""
    module = mock.MagicMock()
    monkeypatch.setitem(sys.modules, library, module)
    for number, (build, attempt) in enumerate(
        (("0a1b", "a"), ("0a1b", "b"), ("2c3d", "a"), ("", "a"))
    ):
        work = dataclasses.replace(
            job(data, tmp_path / str(number), attempt),
            name="train-1234",
            shared_directory=build and f"{tmp_path}/shared/{build}",
        )
        BACKENDS[library](tracker_context(work, "metrics.jsonl"), [])
    found = [call.kwargs[keyword] for call in module.init.call_args_list]
    assert found == ["train-1234-0a1b", "train-1234-0a1b", "train-1234-2c3d", "train-1234"]


def test_tensorboard_has_one_run_for_all_attempts(data, tmp_path, monkeypatch):
    """One directory of a build; what follows the checkpoint of a later attempt is replaced."""
    module = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    entries = [{"kind": "config"}, {"kind": "began", "step": 5}, {"kind": "step", "step": 6}]
    for build, attempt in (("0a1b", "a"), ("0a1b", "b"), ("2c3d", "a")):
        work = dataclasses.replace(
            job(data, tmp_path, attempt), shared_directory=f"{tmp_path}/shared/{build}"
        )
        context = tracker_context(work, "metrics.jsonl")
        BACKENDS["tensorboard"](context, [{"time": 1.0, **entry} for entry in entries])
    calls = [call.kwargs for call in module.SummaryWriter.call_args_list]
    directories = [call["logdir"].removeprefix(f"{tmp_path}/shared/") for call in calls]
    assert directories == [f"{build}/tensorboard" for build in ("0a1b", "0a1b", "2c3d")]
    assert [call["purge_step"] for call in calls] == [6, 6, 6]


def test_each_prompt_has_a_panel_of_its_own():
    """Letters that ASCII lacks, equal beginnings, and marks that services replace."""
    prompts = ["日本語", "中国語", "кот", "a?", "a!", "a-", "", "x" * 60 + "one", "x" * 60 + "two"]
    names = [sample_name(prompt) for prompt in prompts]
    assert len(set(names)) == len(prompts)
    assert all(re.fullmatch(r"samples/[\w.-]*", name, re.ASCII) for name in names)
    assert names[5] == "samples/a-"


@pytest.mark.parametrize("error", [OSError("503"), None])
def test_a_checkpoint_is_recorded_after_its_metrics_are_stored(data, tmp_path, monkeypatch, error):
    """And not at all where the store refuses them: a later run would lack rows."""
    recorded = []
    flush = MetricsLog.flush

    def flush_or_fail(log):
        if error:
            raise error
        flush(log)

    monkeypatch.setattr(MetricsLog, "flush", flush_or_fail)

    def steps():
        return [row["step"] for row in lines(tmp_path, "a", "step")]

    heard = tiny.Heard(commit=lambda *found: recorded.append((found, steps())))
    with run_context(job(data, tmp_path, "a"), heard) as context:
        context.row({"step": 1})
        with contextlib.suppress(OSError):
            context.commit(1, "path")
    assert recorded == ([] if error else [((1, "path"), [1])])


@pytest.mark.slow
def test_secrets_of_the_environment_are_written_nowhere(data, tmp_path, monkeypatch):
    """A canary in the variables that keys are read from is in none of the files."""
    for name in ("WANDB_API_KEY", "HF_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.setenv(name, "canary-1234")
    work = job(data, tmp_path, "a", train={"trackers": ("tensorboard", "wandb", "trackio")})
    with run_context(work) as context:
        context.row({"step": 1, "loss": 2.0})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tmp_path / "runs" / "a" / "metrics.jsonl" in files
    assert not any(b"canary" in path.read_bytes() for path in files)
    (config,) = lines(tmp_path, "a", "config")
    assert config["optimizer"]["learning_rate"] == tiny.OPTIMIZER.learning_rate


@pytest.mark.slow
def test_a_run_that_fails_says_so_in_its_last_row(data, tmp_path, monkeypatch):
    """Whatever ended it."""
    monkeypatch.setattr(Evaluator, "__call__", lambda *_: json.loads("no json"))
    with pytest.raises(ValueError, match="Expecting"):
        run(job(data, tmp_path, "a"))
    (attempt,) = read_attempts([f"{tmp_path}/runs/a"])
    assert attempt.outcome == "failed"
