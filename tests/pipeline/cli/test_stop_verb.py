"""A run that is watched, and stopped, by who sees nothing but its store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from pipeline import Experiment, Result, StepContext, step
from pipeline.cli import stopping
from pipeline.pages.record import runs
from pipeline.store import run_summary
from tests.pipeline.toy import Numbers, write_numbers

SLEEPER = """
import time
from pipeline import Artifact, Experiment, step

@step(output=Artifact, version=1)
def sleeper(run, *, seconds: float):
    print("asleep", flush=True)
    time.sleep(seconds)
    return {{}}

def {name}(seconds: float = 600.0):
    return sleeper(seconds=seconds)

experiment = Experiment({name})
"""

STOPPED = threading.Event()  # from then on shards are quick


def write_slowly(directory: str, item: tuple[int, int]) -> Any:
    STOPPED.wait(0.02)
    return write_numbers(directory, item)


@step(output=Numbers, version=1)
def slow_numbers(run: StepContext, *, shards: int) -> Result:
    run.map(write_slowly, {f"part/{i:03d}": (i, 1) for i in range(shards)})
    return {"count": shards}


def slow(shards: int = 300) -> Any:
    return slow_numbers(shards=shards)


SLOW = Experiment(slow)


@pytest.mark.slow
def test_a_run_is_stopped_through_its_store_and_resumed(ponente, tmp_path, monkeypatch):
    """It ends as after Ctrl-C, keeps its shards; `status --watch` says how each run ended."""
    monkeypatch.setattr(stopping, "LOOK_SECONDS", 0.05)
    store = str(tmp_path / "store")
    asked: list[str] = []

    def ask() -> None:
        while not (found := runs(store)) or not found[0].among("running"):
            time.sleep(0.05)
        asked.append(found[0].run)
        stopping.request_stop(store, found[0].run)

    thread = threading.Thread(target=ask)
    thread.start()
    status, _, err = ponente("run", experiment=SLOW)
    thread.join()
    STOPPED.set()
    assert status == 130
    assert "requested by `ponente stop`" in err
    status, out, _ = ponente("status", "--watch", experiment=SLOW)
    assert status == 1
    assert f"run {asked[0]}: interrupted" in out
    assert "slow_numbers  stopped" in out
    status, _, err = ponente("stop", experiment=SLOW)
    assert status == 1
    assert "none is running" in err
    assert ponente("run", experiment=SLOW)[0] == 0
    status, out, _ = ponente("status", "--watch", experiment=SLOW)
    assert status == 0
    assert "slow_numbers  executed" in out


def test_only_a_run_of_the_experiment_is_stopped(ponente, tmp_path):
    """By its name where several run; none of another experiment, none that does not exist."""
    assert "found no run of slow" in ponente("stop", experiment=SLOW)[2]
    folder = tmp_path / "store" / "events"
    folder.mkdir(parents=True)
    for name in ("20260101-000000-aaaaaa", "20260101-000001-bbbbbb"):
        started = f'{{"time": {time.time()}, "event": "run_started", "experiment": "slow"}}\n'
        (folder / f"{name}.jsonl").write_text(started)
    message = ponente("stop", experiment=SLOW)[2]
    assert "expected the name of one run; running are 20260101-000001-bbbbbb, 2026" in message
    assert "cannot stop other: running are" in ponente("stop", "other", experiment=SLOW)[2]
    assert ponente("stop", "20260101-000000-aaaaaa", experiment=SLOW)[0] == 0
    assert [path.name for path in folder.glob("*.stop")] == ["20260101-000000-aaaaaa.stop"]


def test_a_live_run_is_found_behind_any_number_of_newer_ones(ponente, tmp_path):
    """By name and without; `status` and `status --watch` find the experiment's newest run."""
    folder = tmp_path / "store" / "events"
    folder.mkdir(parents=True)
    start = '{{"time": {}, "event": "run_started", "experiment": "{}"}}\n'
    end = '{{"time": {}, "event": "run_finished", "outcome": "ok", "executed": []}}\n'
    mine, now = "20260101-000000-aaaaaa", time.time()
    (folder / f"{mine}.jsonl").write_text(start.format(now, "slow"))
    for number in range(101):
        log = folder / f"20260102-000000-{number:06x}.jsonl"
        log.write_text(start.format(now, "another") + end.format(now))
    for words in ((), (mine,)):
        assert f"run {mine} will stop" in ponente("stop", *words, experiment=SLOW)[1]
    assert ponente("status", "--json", experiment=SLOW)[0] == 0
    with (folder / f"{mine}.jsonl").open("a") as file:
        file.write(end.format(now))
    assert f"run {mine}: finished" in ponente("status", "--watch", experiment=SLOW)[1]
    assert f"run {mine} ended at" in ponente("stop", mine, experiment=SLOW)[2]


def _sleeper(folder, file, name):
    (folder / file).write_text(SLEEPER.format(name=name))
    words = [sys.executable, "-m", "pipeline.cli", "run", str(folder / file)]
    words += ["--prefix", str(folder / "store"), "--executor", "inline"]
    started = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert any("asleep" in line for line in started.stdout)
    return started


@pytest.mark.slow
def test_a_killed_driver_is_dead_to_every_verb_at_once(tmp_path, typed):
    """`status`, `stop` and the table of runs agree; the run beside it, which lives, is stopped."""
    dead = _sleeper(tmp_path, "first.py", "mine")
    os.kill(dead.pid, signal.SIGKILL)
    dead.wait()
    (run,) = run_summary.run_ids(str(tmp_path / "store"))

    def say(verb, file, *words):
        return typed(verb, tmp_path / file, *words, "--prefix", tmp_path / "store")

    assert f"run {run}: killed (no exit record)" in say("status", "first.py")[1]
    status, out, _ = say("status", "first.py", "--watch")
    assert (status, "sleeper  stopped" in out) == (1, True)
    err = say("stop", "first.py", run)[2]
    assert f"run {run}: its process ended without an exit record at 20" in err
    assert "nothing to stop" in err
    other = _sleeper(tmp_path, "second.py", "mine")
    try:
        err = say("stop", "first.py")[2]
        assert f"run {run}: its process ended" in err
        assert "none is running" in err
        status, out, _ = say("stop", "second.py")
        assert (status, run in out) == (0, False)
    finally:
        other.kill()
        other.wait()
