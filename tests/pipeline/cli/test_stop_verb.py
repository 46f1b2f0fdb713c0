"""A run that is watched, and stopped, by who sees nothing but its store."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from pipeline import Experiment, Result, StepContext, step
from pipeline.cli import stopping
from pipeline.pages.record import runs
from tests.pipeline.toy import Numbers, write_numbers

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
