"""What a published output lets go of: the data of other attempts, and nothing people look at."""

from __future__ import annotations

import os
import time
import uuid

import pytest

from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.store import lease, storage
from pipeline.store.garbage import delete, find_garbage
from pipeline.store.left_overs import tidy
from pipeline.store.outputs import Store
from pipeline.store.protection import Keep
from tests.pipeline.helpers import bring_up, executed
from tests.pipeline.toy import numbers

KEPT = ("log.txt", "failure.json", "keep/metrics.jsonl", "keep/traces/step-00000003/host.xplane.pb")
DATA = (
    "checkpoints/00000010.a/weights",
    "shards/tokens/0/data.bin",
    "shards-2/half/data.bin",
    "of-a-step-of-ones-own.bin",
)


def _files(directory):
    return {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}


def _held(root):
    """The lease on a step."""
    return lease.acquire(str(root), published=lambda: False, waiting=lambda _: None)


def _clean(root, wanted):
    """As gc does for the graph of a node, or as the publishing attempt tidies up."""
    if wanted is not None:
        store = Store(str(root.parent))
        delete(store, find_garbage(store, topological([wanted])).garbage)
        return
    held = _held(root)
    tidy(str(root), held, "000002-mine", lost=False)
    held.release()


@pytest.mark.parametrize("collect", [False, True])
def test_of_another_attempt_the_data_goes_and_what_people_look_at_stays(tmp_path, collect):
    """As the publishing attempt tidies up, and as gc does."""
    node = as_node(numbers(count=4))
    bring_up(str(tmp_path), numbers(count=4))
    root = tmp_path / node.directory
    attempt = root / "attempts" / "000000-dead"
    for name in (*KEPT, *DATA):
        storage.write_atomic(str(attempt / name), b"x")
    _clean(root, node if collect else None)
    assert _files(attempt) == set(KEPT)
    assert executed(str(tmp_path), numbers(count=4)) == []


def test_a_builder_that_was_replaced_deletes_nothing_of_its_successor(tmp_path):
    """It wakes up after another process took the lease over and wrote shards of a rebuild."""
    bring_up(str(tmp_path), numbers(count=4))
    root = tmp_path / as_node(numbers(count=4)).directory
    held = _held(root)
    held.stop()
    later = root / "attempts" / f"{held.number + 1:06d}-later"
    older = root / "attempts" / "000000-older"
    for attempt in (older, later):
        storage.write_atomic(str(attempt / "shards/part/n.txt"), b"x")
    storage.write_atomic(str(root / "leases" / f"{held.number + 1:06d}.json"), b"{}")
    tidy(str(root), held, f"{held.number:06d}-mine", lost=True)
    assert _files(later) == {"shards/part/n.txt"}
    assert _files(older) == {"shards/part/n.txt"}


def test_a_link_that_a_tracker_left_is_deleted_and_what_it_leads_to_is_not(tmp_path):
    """Of an output that no experiment reaches, as W&B's `latest-run`."""
    bring_up(str(tmp_path / "store"), numbers(count=4))
    root = tmp_path / "store" / as_node(numbers(count=4)).directory
    attempt = root / "attempts" / "000000-dead"
    (tmp_path / "elsewhere").write_bytes(b"1234")
    (attempt / "wandb").mkdir(parents=True)
    (attempt / "wandb" / "latest-run").symlink_to(tmp_path / "elsewhere")
    (attempt / "wandb" / "gone").symlink_to(tmp_path / "nowhere")
    store = Store(str(tmp_path / "store"))
    delete(store, find_garbage(store, []).garbage)
    assert not root.exists()
    assert (tmp_path / "elsewhere").read_bytes() == b"1234"


def test_an_output_that_is_being_built_is_left(tmp_path):
    """By gc, whether or not an experiment reaches it, and whenever the build begins."""
    bring_up(str(tmp_path), numbers(count=4))
    root = tmp_path / as_node(numbers(count=4)).directory
    store = Store(str(tmp_path))
    before = _files(root)
    found = find_garbage(store, [])
    assert [item.url for item in found.garbage] == [str(root)]
    held = _held(root)
    assert find_garbage(store, []).garbage == []
    freed, left = delete(store, found.garbage)
    assert freed == 0
    assert len(left) == 1
    assert before <= _files(root)
    held.release()


def test_a_dead_hosts_lease_keeps_nothing(tmp_path, monkeypatch):
    """Listed although no one look can tell that its owner is gone; deleted once it was watched.

    An owner that beats is left: at the look if the beat is young, else while the lease is watched.
    """
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.05)
    bring_up(str(tmp_path), numbers(count=4))
    root = tmp_path / as_node(numbers(count=4)).directory
    record = root / "leases" / "000009.json"
    record.write_text('{"host": "elsewhere 1 2", "pid": 7, "nonce": "x", "since": 0}')
    store = Store(str(tmp_path))
    (line,) = find_garbage(store, []).left
    assert "being built by process 7 on elsewhere" in line
    os.utime(record, (1, 1))
    found = find_garbage(store, [])
    assert [item.url for item in found.garbage] == [str(root)]
    assert not lease.holder(str(root)).responsive
    assert delete(store, found.garbage, wait=5)[1] == []
    assert not root.exists()


@pytest.mark.parametrize("name", ["notes-of-twenty-characters", "photo-0123456789abcdef0123"])
def test_what_only_looks_like_an_output_is_never_deleted(tmp_path, name):
    """A name of the right shape is not enough: an output has a manifest, ledger or attempts."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("all of it")
    store = Store(str(tmp_path))
    delete(store, find_garbage(store, []).garbage)
    assert (tmp_path / name / "thesis.txt").exists()


def test_the_age_of_garbage_is_by_the_clock_of_the_store(tmp_path, monkeypatch):
    """What was just written is young, on a machine whose clock is hours ahead too."""
    bring_up(str(tmp_path), numbers(count=4))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 7200)
    keep = Keep(recorded=False, younger_than=3600.0)
    assert find_garbage(Store(str(tmp_path)), [], keep).garbage == []
    assert find_garbage(Store(str(tmp_path)), []).garbage != []


@pytest.mark.parametrize("collect", [False, True])
def test_temporary_files_of_killed_writers_go_and_those_of_live_ones_stay(tmp_path, collect):
    """Wherever they are: a day old, nobody is writing them."""
    node = as_node(numbers(count=4))
    bring_up(str(tmp_path), numbers(count=4))
    root = tmp_path / node.directory
    shard = next(root.glob("attempts/*/shards/*/0*"))
    places = (root, root / "leases", next(root.glob("ledger/*")), shard)
    young = [folder / f"record.json.{uuid.uuid4().hex}.tmp" for folder in places]
    old = [folder / f"record.json.{uuid.uuid4().hex}.tmp" for folder in places]
    for path in (*young, *old):
        path.write_bytes(b"half of a rec")
    for path in old:
        os.utime(path, (time.time() - 90_000,) * 2)
    _clean(root, node if collect else None)
    assert [path for path in old if path.exists()] == []
    assert all(path.exists() for path in young)
    assert executed(str(tmp_path), numbers(count=4)) == []
