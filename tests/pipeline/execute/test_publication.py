"""What is published: the shards a body declared, and never over another attempt's output."""

from __future__ import annotations

import contextlib
import shutil
import threading
from pathlib import Path

import pytest

from pipeline import Result, StepContext, step
from pipeline.errors import StepFailed, WorkerLost
from pipeline.graph.step import as_node
from pipeline.store import integrity, lease, manifest, storage
from pipeline.store.ledger import Ledger
from tests.pipeline.helpers import bring_up, ledgers, manifest_of, path_of
from tests.pipeline.toy import Numbers, numbers, total, write_numbers

HOOKS = {}


@step(output=Numbers, version=1)
def hooked(run: StepContext, *, count: int) -> Result:
    """Numbers by two calls of `map`, with something done to the store in between."""
    items = {f"part/{i}": (i, 1) for i in range(count)}
    run.map(write_numbers, dict(list(items.items())[:2]))
    if hook := HOOKS.pop("between", None):
        hook(run)
    return {"count": len(run.map(write_numbers, items))}


def _published(store):
    path = path_of(str(store), hooked(count=4))
    found = manifest.load(path)
    assert not list(integrity.problems(path, found))
    return [shard.name for shard in found.shards]


@pytest.mark.parametrize("what", ["record", "files", "both"])
def test_a_shard_that_was_deleted_meanwhile_is_built_again(tmp_path, what):
    """By anything, between two calls of the body: never published without it."""

    def delete(run):
        shard = run.ledger.find("part/1")
        if what != "files":
            storage.delete_tree(run.ledger.record("part/1"))
        if what != "record":
            shutil.rmtree(Path(run.root, shard.root))

    HOOKS["between"] = delete
    events = []
    bring_up(str(tmp_path), hooked(count=4), events=events)
    assert _published(tmp_path) == [f"part/{i}" for i in range(4)]
    (retried,) = [event for event in events if event["event"] == "retried"]
    assert "part/1" in retried["cause"]


def test_what_others_put_in_the_ledger_is_not_published(tmp_path):
    """The ledger is shared by attempts; an output is what its own body declared."""

    def add(run):
        directory = storage.join(run.root, "attempts", "000000-other", "shards", "extra")
        storage.write_atomic(storage.join(directory, "n.txt"), b"1")
        run.ledger.add("extra", directory, {})

    HOOKS["between"] = add
    bring_up(str(tmp_path), hooked(count=4))
    assert _published(tmp_path) == [f"part/{i}" for i in range(4)]


def test_a_rebuild_that_was_paused_does_not_replace_the_one_that_was_published(
    tmp_path, monkeypatch
):
    """Stopped between its last look at the lease and its write, while another rebuild publishes."""
    store, wanted = str(tmp_path), numbers(count=4)
    bring_up(store, wanted)
    newest, replaced = lease.Lease.newest, []

    def pause(held):
        answer = newest(held)
        if not replaced:
            replaced.append(held)
            lease.end(path_of(store, wanted))
            bring_up(store, wanted, force=("numbers",))
            replaced.append(manifest_of(store, wanted))
        return answer

    monkeypatch.setattr(lease.Lease, "newest", pause)
    bring_up(store, wanted, force=("numbers",))
    path = path_of(store, wanted)
    assert manifest.load(path) == replaced[1]
    assert not list(integrity.problems(path, replaced[1]))


def test_an_older_attempt_cannot_drop_or_replace_what_a_newer_one_owns(tmp_path):
    """And the newer one can do both with the older one's."""
    ledger = Ledger(str(tmp_path))
    for attempt in ("000001-a", "000002-b"):
        storage.write_atomic(f"{tmp_path}/attempts/{attempt}/x", attempt.encode())
    old, new = (f"{tmp_path}/attempts/{attempt}" for attempt in ("000001-a", "000002-b"))
    for name in ("claimed", "replaced", "left"):
        ledger.add(name, old, {}, replace=True)
    assert ledger.claim("claimed", "000002-b").attempt == "000001-a"
    assert ledger.add("replaced", new, {}, replace=True).attempt == "000002-b"
    for name in ("claimed", "replaced"):
        with pytest.raises(WorkerLost, match="took over"):
            ledger.drop(name, "000001-a")
        with pytest.raises(WorkerLost, match="took over"):
            ledger.add(name, old, {}, replace=True)
        with pytest.raises(WorkerLost, match="took over"):
            ledger.claim(name, "000001-a")
    ledger.drop("left", "000002-b")
    assert ledger.claim("left", "000002-b") is None
    assert set(ledgers(str(tmp_path))[0].finished()) == {"claimed", "replaced"}


@pytest.mark.slow
@pytest.mark.parametrize("shown", [True, False])
def test_an_input_that_is_shown_late_is_awaited(tmp_path, monkeypatch, shown):
    """As a network file system may do to a worker; and no longer than a minute."""
    monkeypatch.setattr(manifest, "_LATE_SECONDS", 20.0 if shown else 0.3)
    source, hidden, events = numbers(count=4), tmp_path / "hidden", []
    there = tmp_path / "store" / as_node(source).directory / manifest.NAME
    back = threading.Timer(0.3, lambda: hidden.rename(there))

    class Hiding(list):
        def append(self, event):
            if event["event"] == "started" and event["step"] == "total":
                there.rename(hidden)
                if shown:
                    back.start()
            events.append(event["event"])

    with contextlib.nullcontext() if shown else pytest.raises(StepFailed, match="is gone"):
        bring_up(str(tmp_path / "store"), total(source), events=Hiding())
    assert "retried" not in events
