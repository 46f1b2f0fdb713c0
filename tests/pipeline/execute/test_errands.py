"""The driver's own operations on the store: patient, concurrent, fatal to one step at most."""

from __future__ import annotations

import itertools
import os
import random
import threading

import pytest

from pipeline.errors import InputError, StepFailed
from pipeline.execute import node_state
from pipeline.execute.driver_store import DriverStore
from pipeline.execute.errands import PATIENCE_SECONDS
from pipeline.execute.node_state import NodePhase, States
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.plan.state import Selection
from pipeline.store import storage
from tests.faults.fake_gcs import FakeGCS
from tests.pipeline.helpers import Timed, check_invariants, run_on
from tests.pipeline.toy import Scale, numbers, scaled, total


class _Late(Timed):
    """The first step's manifest shows only after a while.

    As on a network file system that remembers that the file was not there. Other steps run until
    that one is settled or given up: they would be lost if the run ended.
    """

    def __init__(self, hidden):
        super().__init__()
        self._hidden, self._requests, self._aside = hidden, [], None

    def submit(self, request):
        self._requests.append(request)

    def poll(self):
        self.now += 0.2
        if self._aside is not None and self.now > self._hidden:
            os.rename(f"{self._aside}.hidden", self._aside)
            self._aside = None
        if not self._requests or (self._aside is not None and self.now < PATIENCE_SECONDS + 60):
            return []
        request, outcome = self.execute(self._requests.pop(0))
        if self._hidden and self._aside is None and request.label == "numbers":
            self._aside = storage.join(request.root, "manifest.json")
            os.rename(self._aside, f"{self._aside}.hidden")
        return [(request, outcome)]

    def end(self, key):
        raise AssertionError("a running step was ended")


def _run(prefix, hidden):
    events = []
    # Of two steps that run at a time, the first one's manifest is late and the other goes on.
    wanted = [total(numbers(count=4)), numbers(count=6, shards=3)]
    return run_on(_Late(hidden), prefix, *wanted, events=events), events


def test_a_manifest_that_shows_after_a_minute_is_waited_for(tmp_path):
    """The step was reported as published: it is settled once it shows, and not run again."""
    execution, events = _run(str(tmp_path), 60)
    assert len(execution.published) == 3
    kinds = [event["event"] for event in events]
    assert kinds.count("started") == 3
    assert kinds.count("retrying") > 3
    assert "shows no manifest" in next(e["cause"] for e in events if e["event"] == "retrying")
    assert check_invariants(str(tmp_path)) == 3


def test_a_step_that_cannot_be_settled_fails_and_the_others_end_well(tmp_path):
    """After ten minutes the step fails, by name; what ran beside it is finished and kept."""
    with pytest.raises(StepFailed, match=r"output of step numbers, .*shows no manifest") as failure:
        _run(str(tmp_path), float("inf"))
    assert str(failure.value).count("numbers,") == 1
    assert check_invariants(str(tmp_path)) == 1


@pytest.mark.slow
def test_on_a_bucket_the_drivers_requests_are_concurrent(monkeypatch):
    """Four claims of builds wait for each other, which only four at a time can do."""
    meeting, claim, events = threading.Barrier(4), DriverStore.claim, []

    def together(*arguments):
        meeting.wait(30)
        return claim(*arguments)

    monkeypatch.setattr(DriverStore, "claim", together)
    with FakeGCS():
        wanted = [as_node(numbers(count=2 * n)) for n in range(1, 9)]
        execution = run_on(_Late(0), "gs://bucket/runs", *wanted, events=events)
        assert check_invariants("gs://bucket/runs") == len(execution.published) == 8
    assert {node.key for node in execution.executed} == {node.key for node in wanted}
    assert [e["event"] for e in events].count("started") == 8


def _layers():
    layer = [numbers(count=2 * n) for n in range(1, 4)]
    for factor in range(2, 5):
        layer = [scaled(node, scale=Scale(factor)) for node in layer]
    return topological([as_node(total(a, b)) for a, b in itertools.product(layer, layer)])


@pytest.mark.parametrize("seed", range(5))
def test_the_unsettled_nodes_are_those_at_work_and_all_their_users(seed):
    """However phases change, the counts that are kept say what a search of the graph says."""
    order, draw = _layers(), random.Random(seed)
    states = States(order)
    for _ in range(200):
        state = states[draw.choice(order).key]
        states.move(
            state, draw.choice([p for p in NodePhase if p in node_state._MOVES[state.phase]])
        )
        active = {
            n.key for n in order if states[n.key].phase not in (NodePhase.IDLE, NodePhase.FAILED)
        }
        unsettled = {key for key, state in states.items() if state.unsettled}
        assert unsettled == states.with_users(active)
        assert states.candidates.keys() <= states.among(NodePhase.WAITING).keys()


@pytest.mark.parametrize("jobs", [-1, True, 1.5, "2"])
def test_a_number_of_jobs_that_is_none_is_refused(jobs):
    with pytest.raises(InputError, match="jobs: expected a number of steps"):
        Selection(jobs=jobs)
