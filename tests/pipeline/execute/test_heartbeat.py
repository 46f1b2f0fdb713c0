"""What the driver's collector knows of workers, and which of them are lost by it."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from pipeline.execute.ray import heartbeat
from pipeline.execute.ray.heartbeat import HeartbeatAges


@pytest.mark.parametrize("seed", range(3))
def test_the_collector_counts_as_a_list_of_all_heartbeats_would(monkeypatch, seed):
    """Ages by body, and of nodes with a worker that is expected, whatever comes and goes."""
    draw, told, beats = random.Random(seed), SimpleNamespace(now=0.0), {}
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: told.now))
    collector = heartbeat._Collector()
    names = ["a", "b", *(f"{body}/{n}/x" for body in "ab" for n in range(4)), "a/gang-0/0"]
    for _ in range(400):
        told.now += 1
        name = draw.choice([*names, "a/gang-0"])
        if draw.random() < 0.6 and name in names:
            node = f"node-{len(name) % 3}"
            assert collector.beat(name, node) is False
            beats[name] = (told.now, node)
        else:
            collector.forget(name)
            beats = {n: b for n, b in beats.items() if n != name and not n.startswith(name + "/")}
        for body in "ab":
            mine = {n: told.now - at for n, (at, _) in beats.items() if n.split("/")[0] == body}
            assert collector.ages(body).workers == mine
        ages = collector.drain(())[1]
        assert ages.workers == {n: told.now - at for n, (at, _) in beats.items() if "/" not in n}
        assert ages.nodes.keys() == {node for _, node in beats.values()}
    collector.drain({"a"})
    assert collector.beat("a/1/x", "node-0")
    assert not collector.beat("b/1/x", "node-0")


def test_a_collector_that_was_made_again_costs_no_worker(monkeypatch):
    """It knows none until they send a heartbeat; one that never does is lost in time."""
    monkeypatch.setenv("PONENTE_HEARTBEAT_TIMEOUT", "60")
    told = SimpleNamespace(now=0.0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: told.now))
    watch, waited_for = heartbeat.FailureDetector(), {"trains": 0.0, "hangs": 0.0, "queued": 9e4}
    told.now = 1e5
    known = HeartbeatAges({"trains": 2.0, "hangs": 2.0}, {"node": 2.0})
    assert watch.lost(known, waited_for) == {"queued": False}
    waited_for["queued"] = told.now
    told.now += 100
    assert watch.lost(HeartbeatAges(), waited_for) == {}
    told.now += 59
    assert watch.lost(HeartbeatAges({"trains": 1.0}), waited_for) == {}
    told.now += 2
    assert watch.lost(HeartbeatAges({"trains": 1.0}), waited_for) == {"hangs": True}
