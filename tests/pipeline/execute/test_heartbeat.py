"""What the driver's collector knows of workers, and which of them are lost by it."""

from __future__ import annotations

from types import SimpleNamespace

from pipeline.execute.ray import heartbeat
from pipeline.execute.ray.heartbeat import HeartbeatAges


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


def test_the_collector_knows_bodies_their_workers_and_nodes(monkeypatch):
    """What is forgotten takes its workers along, and a node is as old as its youngest heartbeat."""
    told = SimpleNamespace(now=0.0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: told.now))
    collector = heartbeat._Collector()
    for name, node in (("a", "x"), ("a/1", "x"), ("a/gang/0", "y"), ("b", "y"), ("b/1", "z")):
        told.now += 1
        assert not collector.beat(name, node)
    assert collector.ages("a").workers == {"a": 4.0, "a/1": 3.0, "a/gang/0": 2.0}
    collector.forget("a/gang")
    collector.forget("b")
    ages = collector.drain({"b"})[1]
    assert (ages.workers, ages.nodes) == ({"a": 4.0}, {"x": 3.0})
    assert [collector.beat(name, "x") for name in ("a/1", "b/1")] == [False, True]
