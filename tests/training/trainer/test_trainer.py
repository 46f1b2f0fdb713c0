"""The whole loop: a resumed run is the uninterrupted one, and every way to stop is clean."""

import dataclasses
import functools
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest

from pipeline.errors import CorruptOutput, InputError, WorkerLost
from tests.training import tiny
from training.checkpoint import files
from training.evaluate import evaluator
from training.trainer import compile_ahead, run_context, trainer

pytestmark = pytest.mark.usefixtures("sigterm")
HALF = dataclasses.replace(tiny.TRAIN, parallel=tiny.split(2))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Uninterrupted runs by number of devices: (result, committed checkpoints, job)."""

    @functools.cache
    def whole(devices):
        job = tiny.make_job(
            data,
            train=tiny.TRAIN if devices == 1 else HALF,
            checkpoint_directory=str(tmp_path_factory.mktemp("whole")),
        )
        heard = tiny.Heard()
        result = tiny.run(job, heard, devices)
        return result, heard.committed, job

    return whole


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "step"), [(1, 5), (4, 3)])
def test_resumed_run_is_the_uninterrupted_one(whole, tmp_path, devices, step):
    """Resumed at a step, history, evaluations and final parameters have the same bits."""
    want, committed, job = whole(devices)
    resumed = dataclasses.replace(
        job, resume_from=tuple(committed[:step]), checkpoint_directory=str(tmp_path)
    )
    got = tiny.run(resumed, devices=devices)
    assert tiny.entries(resumed, "resumed") == [{"step": step, "path": committed[step - 1][1]}]
    tiny.assert_same_run(got, want)
    assert (got.steps, got.compilations) == (6, 1)


@pytest.mark.slow
def test_result_of_an_uninterrupted_run(whole):
    """Rows for every step, evaluations at 0, every 4 and the end, checkpoints at every step."""
    result, committed, _ = whole(1)
    assert [row["step"] for row in tiny.rows(result)] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in tiny.rows(result, "evaluations")] == [0, 4, 6]
    assert [step for step, _ in committed] == [1, 2, 3, 4, 5, 6]
    assert result.checkpoint == committed[-1][1]
    assert (result.steps, result.preempted, result.compilations) == (6, False, 1)
    assert result.backend == "reference"
    assert "cpu" in result.backend_reason
    assert all(np.isfinite(row["loss"]) for row in tiny.rows(result))
    parts = {name: value for name, value in result.seconds.items() if name != "total"}
    assert sum(parts.values()) < 1.2 * result.seconds["total"]


@pytest.mark.slow
def test_finished_run_is_not_trained_again(whole, tmp_path):
    """Resuming from the last step returns its history and its checkpoint at once."""
    want, committed, job = whole(1)
    unused = str(tmp_path / "unused")
    got = tiny.run(job, resume_from=tuple(committed), checkpoint_directory=unused)
    assert tiny.rows(got) == tiny.rows(want)
    assert got.checkpoint == want.checkpoint
    assert got.compilations == 0
    assert [path.name for path in (tmp_path / "unused").iterdir()] == ["metrics.0"]


@pytest.mark.slow
def test_sigterm_saves_and_the_next_run_goes_on(whole, tmp_path):
    """A signal at step 2 ends the run with a checkpoint; resumed, it ends as if uninterrupted."""
    want, _, job = whole(1)
    config = dataclasses.replace(tiny.TRAIN, checkpoint_every=1000)
    job = dataclasses.replace(job, train=config, checkpoint_directory=str(tmp_path))

    def progress(step, steps, row):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    heard = tiny.Heard(progress=progress)
    stopped = tiny.run(job, heard)
    assert stopped.preempted
    assert 2 <= stopped.steps < 6
    assert heard.committed == [(stopped.steps, stopped.checkpoint)]
    got = tiny.run(job, resume_from=tuple(heard.committed), attempt="1")
    assert not got.preempted
    tiny.assert_same_run(got, want)


@pytest.mark.slow
def test_damaged_newest_checkpoint_falls_back_loudly(whole, tmp_path):
    """The run goes on from the older checkpoint, says so, and ends with the same bits."""
    want, committed, job = whole(1)
    copies = []
    for step, path in committed[:3]:
        shutil.copytree(path, tmp_path / str(step))
        copies.append((step, str(tmp_path / str(step))))
    logs = os.path.basename(job.metrics_directory)  # which the copies refer to beside them
    shutil.copytree(job.metrics_directory, tmp_path / logs)
    os.unlink(tmp_path / "3" / "arrays" / "step" / "c")
    heard = tiny.Heard()
    new = str(tmp_path / "new")
    got = tiny.run(job, heard, resume_from=tuple(copies), checkpoint_directory=new)
    told = [(kind, fields["step"]) for kind, fields in heard.events[:2]]
    assert told == [("corrupt_checkpoint", 3), ("resumed", 2)]
    assert heard.dropped[0] == copies[2], "its record would stand in the way of publishing"
    tiny.assert_same_run(got, want)


@pytest.mark.slow
def test_no_sound_checkpoint_stops_the_run(data, tmp_path):
    """With records of checkpoints that are all gone, training does not begin again."""
    gone = ((1, str(tmp_path / "gone")),)
    job = tiny.make_job(data, checkpoint_directory=str(tmp_path), resume_from=gone, attempt="1")
    with pytest.raises(CorruptOutput, match="none of 1"):
        tiny.run(job)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel": tiny.split(3)}, "8 devices are not divisible by a group of 3"),
        ({"batch_size": 12}, "12 from step 0 on is not divisible by 8 devices"),
        ({"batch_schedule": ((4, 12),)}, "12 from step 4 on is not divisible by 8 devices"),
        ({"attention": "splash"}, "splash cannot run"),
    ],
)
def test_what_does_not_fit_the_devices_is_refused(data, tmp_path, changes, words):
    """Refused in one line; no checkpoint is begun."""
    job = tiny.make_job(data, train=changes, checkpoint_directory=str(tmp_path / "none"))
    with pytest.raises(InputError, match=words) as caught:
        trainer.train(job)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_divergence_stops_the_run_and_keeps_the_last_good_checkpoint(data, tmp_path):
    """An infinite learning signal is never applied; after max_skipped steps the run stops."""
    optimizer = dataclasses.replace(tiny.OPTIMIZER, learning_rate=1e38, warmup=0, weight_decay=1e3)
    train = {"max_skipped": 2, "checkpoint_every": 1000}
    job = tiny.make_job(data, optimizer=optimizer, train=train, checkpoint_directory=str(tmp_path))
    with pytest.raises(InputError, match="not finite"):
        tiny.run(job)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.0"], "no checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": 1e38, "weight_decay": 1e3}, "no step changed.*6 of the 6 updates"),
        ({"learning_rate": 1e17}, "loss on validation after 6 of 6 steps is nan"),
    ],
)
def test_a_run_that_learned_nothing_is_no_success(data, tmp_path, changes, words):
    """Every step skipped, or a last loss that is not finite: refused, also by the next attempt."""
    optimizer = dataclasses.replace(tiny.OPTIMIZER, warmup=0, **changes)
    train = {"evaluate_every": 100}
    job = tiny.make_job(data, optimizer=optimizer, train=train, checkpoint_directory=str(tmp_path))
    heard = tiny.Heard()
    with pytest.raises(InputError, match=words):
        tiny.run(job, heard)
    with pytest.raises(InputError, match=words):
        tiny.run(job, resume_from=tuple(heard.committed), attempt="1")


@pytest.mark.slow
def test_sigterm_does_not_wait_for_the_first_compilation(data, tmp_path, monkeypatch):
    """The run ends at step 0 without a checkpoint, and its log has one "preempted" event."""
    compile, earlier = compile_ahead.PhaseCompiler._compile, set(threading.enumerate())

    def signalled(*arguments):
        # A run of an earlier test that was refused may still compile in its thread.
        if threading.current_thread() not in earlier:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        return compile(*arguments)

    monkeypatch.setattr(compile_ahead.PhaseCompiler, "_compile", signalled)
    job = tiny.make_job(data, checkpoint_directory=str(tmp_path))
    stopped = tiny.run(job)
    assert (stopped.preempted, stopped.steps, stopped.checkpoint) == (True, 0, "")
    assert len(tiny.entries(job, "preempted")) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("evaluation_number", "at"), [(1, 0), (2, 4), (3, 6)])
def test_sigterm_does_not_wait_for_an_evaluation(
    whole, tmp_path, monkeypatch, evaluation_number, at
):
    """A signal amid one saves at once, also when only the last scores are missing.

    The next attempt scores that step and ends as the run that was never interrupted.
    """
    want, _, job = whole(1)
    config = dataclasses.replace(tiny.TRAIN, checkpoint_every=1000)
    job = dataclasses.replace(job, train=config, checkpoint_directory=str(tmp_path))
    calls, heard, read = [], tiny.Heard(), evaluator.read_batches

    def signalled(*arguments):
        calls.append(1)
        for batch in read(*arguments):
            if len(calls) == evaluation_number:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    monkeypatch.setattr(evaluator, "read_batches", signalled)
    stopped = tiny.run(job, heard)
    assert stopped.preempted
    assert len(tiny.entries(job, "preempted")) == 1
    assert [row["step"] for row in tiny.rows(stopped, "evaluations")] == [0, 4, 6][
        : evaluation_number - 1
    ]
    assert heard.committed == ([(at, stopped.checkpoint)] if at else [])
    got = tiny.run(job, heard, resume_from=tuple(heard.committed), attempt="1")
    assert (got.preempted, got.steps) == (False, 6)
    assert got.compilations == (0 if at == 6 else 1)
    assert heard.committed[-1] == (6, got.checkpoint)
    tiny.assert_same_run(got, want)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.slow
def test_an_error_waits_for_the_checkpoint_under_way_and_is_the_one_raised(
    data, tmp_path, monkeypatch, lost
):
    """A slow store is no reason for the watchdog to end the process before either is done.

    Nor does it matter to the error that a newer attempt owns the run by then.
    """
    phases, write = [], files._write_local

    def slow(url, parts):
        if url.endswith("progress.json"):
            while "checkpoint" not in phases:
                time.sleep(0.01)
            if lost:
                raise WorkerLost("a newer attempt owns the run")
        return write(url, parts)

    class Watched(run_context.Watchdog):
        def phase(self, name):
            if diverged:
                phases.append(name)
            return super().phase(name)

    diverged = []

    def progress(step, steps, row):
        if step == 4:
            diverged.append(step)
            raise InputError("diverged")

    monkeypatch.setattr(files, "_write_local", slow)
    monkeypatch.setattr(run_context, "Watchdog", Watched)
    train = {"checkpoint_every": 3, "evaluate_every": 1000}
    job = tiny.make_job(data, train=train, checkpoint_directory=str(tmp_path))
    heard = tiny.Heard(progress=progress)
    with pytest.raises(InputError, match="diverged"):
        tiny.run(job, heard)
    assert [step for step, _ in heard.committed] == ([] if lost else [3])


@pytest.mark.slow
def test_writing_a_profile_is_not_a_step_to_the_watchdog(data, tmp_path, monkeypatch):
    """It may take longer than any step."""
    phases = []

    class Watched(run_context.Watchdog):
        def phase(self, name):
            phases.append(name)
            return super().phase(name)

    monkeypatch.setattr(run_context, "Watchdog", Watched)
    train = {"profile": (2, 1), "evaluate_every": 1000}
    directories = {
        "checkpoint_directory": str(tmp_path / "c"),
        "run_directory": str(tmp_path / "run"),
    }
    job = tiny.make_job(data, train=train, **directories)
    tiny.run(job)
    assert phases.count("profile") == 2
    assert list((tmp_path / "run" / "traces").iterdir())
    assert phases[-1] == "ending"
