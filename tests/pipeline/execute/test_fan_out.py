"""The fan-out's loop: how many shards are in flight, and how often it asks which have ended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipeline.errors import InputError
from pipeline.execute.ray import heartbeat, workers
from pipeline.graph.step import Resources
from pipeline.graph.step_context import ShardTask
from pipeline.store.ledger import Ledger


class _Ray:
    """A cluster that grows, on a clock of its own: shards in flight end at once, every second."""

    def __init__(self, cores):
        self.now, self._cores = 1.0, cores
        self.asked, self.most, self._flying = 0, [], []

    def monotonic(self):
        return self.now

    def cluster_resources(self):
        return {"CPU": self._cores[min(int(self.now), len(self._cores) - 1)]}

    def options(self, **options):
        return SimpleNamespace(remote=self._begin)

    def _begin(self, task, *more):
        self._flying.append(task.name)
        return task.name

    def wait(self, references, num_returns, timeout, fetch_local):
        assert not fetch_local
        self.asked += 1
        if timeout:
            self.now += 1.5
            self.most.append(len(self._flying))
            self._flying = []
        ready = references[:num_returns]
        return ready, references[num_returns:]

    def get(self, reference, timeout=None):
        return reference, ""


@pytest.fixture
def fan_out(monkeypatch):
    """Runs 60 shards on a cluster with these cores, second by second."""

    def run(cores, **wants):
        ray = _Ray(cores)
        for module in (workers, heartbeat):
            monkeypatch.setattr(module, "ray", ray)
            monkeypatch.setattr(module, "time", ray)
        monkeypatch.setattr(workers, "_write", ray)
        step = SimpleNamespace(resources=Resources(**wants))
        request = SimpleNamespace(step=step, environment={}, packages=())
        beating = SimpleNamespace(name="body", stopping=False)
        channel = SimpleNamespace(ask=lambda *_, seconds: None, send=lambda *_: None)
        tasks = [ShardTask(Ledger("s"), "a", f"{n:02d}", print, n) for n in range(60)]
        fanned = workers.RayWorkers(channel, request, beating)
        assert sorted(fanned.map(tasks, print)) == [task.name for task in tasks]
        return ray

    return run


def test_a_cluster_that_grows_gets_more_shards(fan_out):
    """Twice as many as it has cores, whenever the loop looks."""
    most = fan_out([1] * 4 + [8] * 90).most
    assert most[:2] == [2, 2]
    assert most[2:5] == [16, 16, 16]


def test_shards_that_end_together_are_taken_together(fan_out):
    """Two questions for each look, and not one for each shard."""
    assert fan_out([15]).asked == 2 * 2


def test_shards_of_several_cores_are_fewer(fan_out):
    assert fan_out([8], shard_cpus=4).most[0] == 4


@pytest.mark.parametrize("wants", [{"shard_cpus": -1}, {"memory": -1}, {"tries": 0}])
def test_resources_that_no_worker_can_have_are_refused(wants):
    with pytest.raises(InputError, match=f"{next(iter(wants))}=.* at least"):
        Resources(**wants)
