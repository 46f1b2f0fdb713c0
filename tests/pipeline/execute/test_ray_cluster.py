"""A Ray cluster of several nodes: nodes that die, nodes that stop responding."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from tests.pipeline.execute import cluster as several
from tests.pipeline.execute.cluster import fanned, runs
from tests.pipeline.helpers import bring_up, check_invariants, ledgers, path_of, run_on

pytestmark = pytest.mark.slow

SHARDS = 12
FREE = {f"part/{10 * i:03d}" for i in range(several.FREE)}
TIMEOUT = 8.0


@pytest.fixture(scope="module")
def cluster():
    """A head and two nodes; a test that takes one away is followed by one that adds another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PONENTE_HEARTBEAT_TIMEOUT", str(TIMEOUT))
        patch.setenv("PYTHONPATH", str(several.ROOT))
        started = several.start()
        yield started
        started.shutdown()


@pytest.fixture
def backend(cluster):
    """Two nodes beside the head, and a driver that joined them."""
    from pipeline.execute.ray.backend import RayBackend

    while len(cluster.worker_nodes) < 2:
        several.add(cluster)
    joined = RayBackend(cluster.address)
    yield joined
    joined.close()


class Disturbance:
    """Listens to a run and does something once, in the middle of its fan-out.

    The victim is the node of the step's body, or else one that only writes shards; it is disturbed
    when some shards are recorded and one that has begun there is not. The run waits for it.
    """

    def __init__(self, cluster: Any, prefix: str, marks: str, *, body: bool, act: Any) -> None:
        self._cluster, self._marks, self._body, self._act = cluster, marks, body, act
        self._path = path_of(prefix, fanned(shards=SHARDS))
        self.events: list[dict[str, Any]] = []
        self.recorded: set[str] = set()  # shards, before it
        self.begun: set[str] = set()  # shards on the victim that were not recorded
        self.frozen: list[int] = []  # processes of the victim

    def __call__(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if self.frozen or len(self.of("shard")) < 2:
            return
        victim = self._victim()
        # A worker that is leased and was given no task yet never learns that its owner is silent.
        while len(self._under_way(*self._cluster.list_all_nodes())) < several.CORES:
            time.sleep(0.05)
        self.frozen = several.freeze(victim)
        self.recorded, self.begun = self._finished(), self._under_way(victim)
        self._act(victim, self.frozen)
        several.open_gate(self._marks)

    def _victim(self) -> Any:
        (home,) = [node for what, node in runs(self._marks) if what == "body"]
        (victim,) = (
            node for node in self._cluster.worker_nodes if (node.node_id == home) == self._body
        )
        return victim

    def _under_way(self, *nodes: Any) -> set[str]:
        """Shards that have begun on these nodes and wait for the gate."""
        ids = {node.node_id for node in nodes}
        here = {what for what, node in runs(self._marks) if node in ids}
        return {what for what in here if what.startswith("part/") and what not in FREE}

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == kind]

    def _finished(self) -> set[str]:
        return {name for ledger in ledgers(self._path) for name in ledger.finished()}


def _disturbed(cluster, backend, tmp_path, *, body, act):
    """A run of a dozen shards, disturbed; it must end with what an undisturbed one makes."""
    prefix, marks = str(tmp_path / "store"), str(tmp_path / "marks")
    disturbance = Disturbance(cluster, prefix, marks, body=body, act=act)
    graph = fanned(shards=SHARDS, marks=marks)
    (found,) = run_on(backend, prefix, graph, events=disturbance).published.values()
    assert disturbance.frozen, "the run ended before anything was done to it"
    (calm,) = bring_up(str(tmp_path / "calm"), fanned(shards=SHARDS)).published.values()
    assert found.manifest.content == calm.manifest.content
    assert found.manifest.result == calm.manifest.result
    assert check_invariants(prefix, finished=True) == 1
    began = Counter(what for what, _ in runs(marks))
    assert {began[shard] for shard in disturbance.recorded} == {1}
    return disturbance, began


@pytest.mark.parametrize("body", [False, True])
def test_a_killed_node_costs_only_what_it_was_doing(cluster, backend, tmp_path, body):
    """Finished shards stay; the others are made again, and the events say which."""

    def kill(node, frozen):
        several.kill(frozen)
        cluster.remove_node(node, allow_graceful=False)

    disturbance, began = _disturbed(cluster, backend, tmp_path, body=body, act=kill)
    again = {shard for shard in began if shard != "body" and began[shard] > 1}
    retried = {e["shard"] for e in disturbance.of("shard_retried")}
    assert disturbance.begun <= again
    assert began["body"] == len(disturbance.of("started")) == 1 + len(disturbance.of("retried"))
    if body:
        (step,) = disturbance.of("retried")
        assert "its host was lost" in step["cause"]
        assert step["tries"] == 0
        assert began["body"] == 2
    else:
        assert disturbance.begun <= again <= retried
        assert began["body"] == 1
        assert {e["tries"] for e in disturbance.of("shard_retried")} == {0}


@pytest.mark.parametrize("body", [False, True])
def test_an_unresponsive_node_is_lost(cluster, backend, tmp_path, body):
    """Its processes are stopped, so that Ray still counts it as alive; the run ends elsewhere."""
    prefix, nodes = tmp_path / "store", []

    def freeze(node, frozen):
        nodes.append((node, frozen))

    try:
        disturbance, began = _disturbed(cluster, backend, tmp_path, body=body, act=freeze)
        published = _files(prefix)
    finally:
        for node, frozen in nodes:
            several.thaw(frozen)
            time.sleep(TIMEOUT / 2)  # for what was in flight there to end
            cluster.remove_node(node, allow_graceful=False)
    assert published.items() <= _files(prefix).items()
    check_invariants(str(prefix))
    # Ray notices too, after a minute: what was retried before it said so.
    retried = {
        e["shard"] for e in disturbance.of("shard_retried") if "stopped responding" in e["cause"]
    }
    if body:
        (step,) = disturbance.of("retried")
        assert "did not respond" in step["cause"]
        assert began["body"] == 2
    else:
        assert disturbance.begun <= retried
        assert {shard for shard in began if began[shard] > 1} <= retried
        assert began["body"] == 1


def _files(path):
    """Everything in a store but logs, leases, and what a frozen writer had not finished."""
    files = (p for p in path.rglob("*") if p.is_file() and p.suffix not in (".jsonl", ".tmp"))
    files = (p for p in files if p.name != "log.txt")
    return {str(p): p.read_bytes() for p in files if p.parent.name != "leases"}
