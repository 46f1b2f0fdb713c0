"""Gangs on a v6e-16 slice, reserved by Ray's own slice scheduler on four nodes of this machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pipeline.errors import Cancelled
from pipeline.execute.event_log import EventLog
from pipeline.execute.executor import Execution
from pipeline.graph.step import as_node
from pipeline.store.outputs import Store
from tests.pipeline.execute import cluster as several
from tests.pipeline.execute.cluster import ROOT
from tests.pipeline.execute.tpu_pod import HOSTS, add_slice, on_pod
from tests.pipeline.helpers import heard, run_on

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        started = several.start()
        add_slice(started)
        yield started
        started.shutdown()


def _alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def _said(directory):
    return {int(p.name.split("-")[1]): p.read_text().split() for p in directory.iterdir()}


def test_a_slice_is_one_gang_and_is_given_back(cluster, tmp_path):
    """One process a host, in the hosts' order; a lost one ends all; the next gang finds room."""
    from pipeline.execute.ray.backend import RayBackend

    ended, retried = {}, []

    def listen(event):
        if event["event"] == "retried":
            ended.update(_said(first))
            retried.append(event["cause"])

    prefix, first, next_ = str(tmp_path / "s"), tmp_path / "first", tmp_path / "next"
    first.mkdir()
    next_.mkdir()
    backend = RayBackend(cluster.address)
    try:
        run_on(backend, prefix, on_pod(name="a", directory=str(first), dies=2), events=listen)
        assert ["process 2 of 4 on v6e-16 died" in cause for cause in retried] == [True]
        assert len(ended) == HOSTS
        assert not any(_alive(pid) for pid in ended)
        run_on(backend, prefix, on_pod(name="b", directory=str(next_)))
    finally:
        backend.close()
    assert len(_said(first)) == 2 * HOSTS
    said = sorted(_said(next_).values())
    assert [s[0] for s in said] == [s[3] for s in said] == ["0", "1", "2", "3"]
    assert {s[1] for s in said} == {"4"}
    assert len({s[2] for s in said}) == 1
    assert len({s[4] for s in said}) == HOSTS


def test_a_slice_that_becomes_free_is_taken_and_a_wait_for_it_is_cancelled(
    cluster, tmp_path, monkeypatch
):
    """The first step waits, says so and is built; the second, which waits for ever, is stopped."""
    from ray.util.tpu import SlicePlacementGroup

    from pipeline.execute.ray.backend import RayBackend

    monkeypatch.setenv("PONENTE_HEARTBEAT_TIMEOUT", "12")
    (tmp_path / "said").mkdir()
    backend = RayBackend(cluster.address)
    holders = [SlicePlacementGroup(topology="4x4", accelerator_version="v6e")]

    def free(event):
        if event["event"] == "waiting_for_resources":
            assert "waiting for v6e-16: no free slice" in event["cause"]
            holders.pop().shutdown()

    try:
        first = on_pod(name="d", directory=str(tmp_path / "said"))
        run_on(backend, str(tmp_path / "s"), first, events=free)
        assert holders == []
        holders.append(SlicePlacementGroup(topology="4x4", accelerator_version="v6e"))
        log = EventLog(str(tmp_path / "s"), "test", [])
        wanted = as_node(on_pod(name="e", directory="no"))
        execution = Execution([wanted], Store(str(tmp_path / "s")), log, "again")

        def cancel(event):
            if event["event"] == "waiting_for_resources":
                cancelled.append(time.monotonic())
                execution.stop()

        cancelled = []
        log.listen(heard(cancel))
        with pytest.raises(Cancelled):
            execution.run(backend, execution.look())
        # A heartbeat brings the word, and the wait asks for it twice a second.
        assert time.monotonic() - cancelled[0] < 15
    finally:
        for holder in holders:
            holder.shutdown()
        backend.close()
