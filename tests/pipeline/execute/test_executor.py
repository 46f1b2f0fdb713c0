"""Executing a graph in this process: reuse, re-execution, failures, adoption of shards."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

import pytest

from pipeline import Artifact, Result, StepContext, step
from pipeline.errors import Cancelled, CorruptOutput, Preempted, StepFailed, WorkerLost
from pipeline.execute.attempt import Ending, Outcome
from pipeline.execute.backend import InlineBackend
from pipeline.execute.driver_store import DriverStore
from pipeline.execute.event_log import EventLog
from pipeline.execute.executor import Execution
from pipeline.graph.step import as_node
from pipeline.store import storage
from pipeline.store.outputs import Store
from tests.pipeline.graph.live_toy import ThreadBackend
from tests.pipeline.helpers import (
    Timed,
    bring_up,
    check_invariants,
    executed,
    path_of,
    result,
    run_on,
)
from tests.pipeline.toy import Numbers, Scale, numbers, refuse, scaled, total


def _graph(count=10, factor=3):
    source = numbers(count=count, shards=5)
    return total(source, scaled(source, scale=Scale(factor)))


def test_a_graph_runs_once_and_is_reused(tmp_path):
    """The second run executes nothing; a change runs what depends on it and nothing else."""
    store = str(tmp_path)
    assert executed(store, _graph()) == ["numbers", "scaled", "total"]
    assert result(store, _graph())["total"] == 180
    assert executed(store, _graph()) == []
    assert check_invariants(store) == 3
    assert executed(store, _graph(factor=4)) == ["scaled", "total"]
    assert executed(store, _graph()) == []


def test_inputs_of_what_is_there_are_not_rebuilt(tmp_path):
    """With the final output published, a missing input is not needed."""
    store = str(tmp_path)
    bring_up(store, _graph())
    shutil.rmtree(path_of(store, numbers(count=10, shards=5)))
    assert executed(store, _graph()) == []


def test_a_refused_input_fails_once_with_cause_log_and_retry(tmp_path):
    """The failure names step, cause, log and command; what was finished stays."""
    store, events = str(tmp_path), []
    with pytest.raises(StepFailed) as failure:
        bring_up(store, refuse(numbers(count=4)), events=events)
    lines = str(failure.value).splitlines()
    assert lines[0] == "step refuse failed: expected something else than 4 numbers"
    log = lines[1].split()[-1]
    assert "InputError" in storage.read_bytes(log).decode()
    assert lines[2].split(maxsplit=1)[1] == "again"
    assert [e["event"] for e in events].count("retried") == 0
    assert executed(store, total(numbers(count=4))) == ["total"]


@pytest.mark.slow
@pytest.mark.parametrize(("error", "tried"), [(Preempted, 6), (WorkerLost, 3)])
def test_a_preemption_uses_up_no_try_and_a_lost_worker_does(tmp_path, error, tried):
    """Taken away five times, of three tries: the step goes on, and does not when it crashed."""
    times = []

    @step(output=Artifact, version=1, name="taken_away")
    def taken_away(run):
        times.append(run.attempt)
        if len(times) <= 5:
            raise error("its machine was taken away")
        return {"times": len(times)}

    with nullcontext() if tried == 6 else pytest.raises(StepFailed, match="taken away"):
        bring_up(str(tmp_path), taken_away())
    assert len(set(times)) == tried


@pytest.mark.slow
def test_a_worker_lost_after_new_shards_uses_up_no_try_of_the_next(tmp_path):
    """Lost at every second of ten shards, of three tries; then for good where nothing is added."""

    @step(output=Artifact, version=1, name="lost_often")
    def lost_often(run, *, shards: int):
        for index in range(shards):
            if index >= 10:
                raise WorkerLost("its machine was taken away")
            if run.ledger.find(f"part/{index}") is None:
                with run.shard(f"part/{index}") as directory:
                    storage.write_atomic(storage.join(directory, "x"), b"x")
                if index % 2:
                    raise WorkerLost("its machine was taken away")
        return {"shards": shards}

    for shards, retried in ((10, 5), (11, 6)):
        events = []
        with nullcontext() if shards == 10 else pytest.raises(StepFailed, match="taken away"):
            bring_up(str(tmp_path), lost_often(shards=shards), events=events)
        assert [e["event"] for e in events].count("retried") == retried


def test_damage_to_a_reused_output_is_noticed(tmp_path):
    """A truncated file of a published output stops the run before anything builds on it."""
    store = str(tmp_path)
    execution = bring_up(store, numbers(count=10))
    found = execution.published[as_node(numbers(count=10)).key]
    shard = found.manifest.shards[0]
    storage.write_atomic(storage.join(found.path, shard.root, "n.txt"), b"")
    with pytest.raises(CorruptOutput, match=r"n\.txt"):
        bring_up(store, total(numbers(count=10)))


SCRIPT = """
import sys, time
from pipeline.store import storage
from tests.pipeline.helpers import bring_up
from tests.pipeline.execute.test_executor import _graph
real = storage.create
def slow(url, data, **options):
    time.sleep(0.004)
    return real(url, data, **options)
storage.create = slow
bring_up(sys.argv[1], _graph())
"""


@pytest.mark.slow
def test_two_executors_at_once_publish_once(tmp_path):
    """Two processes race for one graph: both succeed, each output is built by one attempt."""
    store, marks = str(tmp_path / "store"), tmp_path / "marks"
    environment = {**os.environ, "PONENTE_MARKS": str(marks)}
    racers = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, store], env=environment) for _ in range(2)
    ]
    assert [racer.wait(60) for racer in racers] == [0] * 2
    assert check_invariants(store) == 3
    assert len(marks.read_text().split()) == 5


@pytest.mark.slow
def test_what_another_run_published_after_our_look_is_taken(tmp_path):
    """Most of a graph appears between the look and the run: it is taken, and the rest is run."""
    store = str(tmp_path)
    log = EventLog(store, "late", [])
    layer = [scaled(numbers(count=4), scale=Scale(factor)) for factor in (1, 2, 3)]
    for _ in range(3):
        layer = [scaled(left, scale=Scale(5)) for left in layer]
    graph = [total(left, right) for left in layer for right in layer]
    mine = [scaled(left, scale=Scale(7)) for left in layer]
    late = Execution([as_node(t) for t in (*graph, *mine)], Store(store), log, "again")
    needed = late.look()
    bring_up(store, *graph)
    late.run(InlineBackend(log), needed)
    assert late.executed == [as_node(target) for target in mine]
    assert len(late.published) == len(needed) == 1 + 3 * 4 + 9 + 3
    assert check_invariants(store, finished=True) == len(needed)


class _Hardware(Timed):
    """Its hardware comes and goes; a poll takes no time.

    It ends attempts by `outcomes`, (seconds, outcome) each; later ones are executed.
    """

    def __init__(self, outcomes):
        super().__init__()
        self._outcomes, self._ended = list(outcomes), []

    def submit(self, request):
        if self._outcomes:
            seconds, outcome = self._outcomes.pop(0)
            self.now += seconds
            self._ended.append((request, outcome))
        else:
            self._ended.append(self.execute(request))

    def poll(self):
        ended, self._ended = self._ended, []
        return ended


def _on_hardware(tmp_path, outcomes, **options):
    backend, events = _Hardware(outcomes), []
    run_on(backend, str(tmp_path), numbers(count=4), events=events, **options)
    return backend, events


_TAKEN = Outcome(Ending.UNAVAILABLE, 60, "no free slice")
_PREEMPTED = Outcome(Ending.PREEMPTED, cause="preempted")


@pytest.mark.slow
def test_an_hour_without_hardware_and_losing_it_again_and_again_uses_no_try(tmp_path):
    """The step waits with pauses, is preempted whenever it gets hardware, and is built at last."""
    outcomes = [*[(60, _TAKEN)] * 30, *[(5, _PREEMPTED), (60, _TAKEN)] * 20]
    backend, events = _on_hardware(tmp_path, outcomes)
    kinds = [e["event"] for e in events]
    assert kinds[-1] == "finished"
    assert kinds.count("waiting_for_resources") == 50
    assert {e["tries"] for e in events if e["event"] == "retried"} == {0}
    assert backend.now > 3600


def test_waiting_for_hardware_ends_at_the_users_deadline(tmp_path):
    """With the cause and the time waited; two hours of an allowed one are never used."""
    with pytest.raises(StepFailed, match=r"no free slice; waited \d+ s"):
        _on_hardware(tmp_path, [(60, _TAKEN)] * 200, wait=3600)


def test_retries_back_off(tmp_path):
    """Each pause is about twice the one before, and a step without progress is given up."""
    lost = Outcome(Ending.LOST, cause="its worker died")
    with pytest.raises(StepFailed, match="its worker died; 3 attempts without progress"):
        _on_hardware(tmp_path, [(0, lost)] * 9)
    backend, _ = _on_hardware(tmp_path, [(0, lost)] * 2)
    assert 0.5 + 1 <= sum(backend.sleeps) <= 1.5 + 3


def test_a_stop_that_comes_while_a_step_is_requested_is_heard(tmp_path, monkeypatch):
    """The step is not started, and not requested again and again."""
    log, claims = EventLog(str(tmp_path), "test", []), []
    execution = Execution([as_node(numbers(count=4))], Store(str(tmp_path)), log, "again")
    claim = DriverStore.claim

    def stopped(self, *arguments):
        claims.append(arguments)
        assert len(claims) < 5, "requested again"
        execution.stop()
        return claim(self, *arguments)

    monkeypatch.setattr(DriverStore, "claim", stopped)
    with pytest.raises(Cancelled):
        execution.run(InlineBackend(log), execution.look())
    log.close()
    assert len(claims) == 1


def test_a_stop_waits_for_what_is_in_flight_however_long_it_takes(tmp_path):
    """Hours by the driver's clock: what was begun is published."""
    begun, stopped = threading.Event(), threading.Event()

    @step(output=Numbers, version=1)
    def saving(run: StepContext, *, count: int) -> Result:
        begun.set()
        stopped.wait(30)
        time.sleep(0.3)
        return {"count": count}

    node, log = as_node(saving(count=1)), EventLog(str(tmp_path), "slow", [])
    hours = functools.partial(next, itertools.count(step=3600.0))
    execution = Execution([node], Store(str(tmp_path)), log, "again", clock=hours)

    def stop() -> None:
        begun.wait(30)
        execution.stop()
        stopped.set()

    stopper = threading.Thread(target=stop)
    stopper.start()
    execution.run(ThreadBackend(), execution.look())
    stopper.join()
    assert execution.executed == [node]
