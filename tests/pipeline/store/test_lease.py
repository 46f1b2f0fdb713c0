"""Leases: one holder at a time, dead holders noticed, no wall clock; and stores that fail."""

from __future__ import annotations

import json
import os
import threading
import time

import psutil
import pytest

from pipeline.store import lease, process, storage


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(lease, "LOOK_SECONDS", 0.01)


def _acquire(root, **changes):
    arguments = {"published": lambda: False, "waiting": lambda holder: None, **changes}
    return lease.acquire(str(root), **arguments)


def _never(holder):
    raise AssertionError(f"had to wait for {holder}")


def _record(root, number, owner):
    (root / "leases").mkdir(exist_ok=True)
    (root / "leases" / f"{number:06d}.json").write_text(json.dumps(owner))


def test_who_released_has_published_so_the_next_does_not_repeat_it(tmp_path, monkeypatch):
    """A holder that ends between two looks leaves an output, not a lease to take."""
    held, published = _acquire(tmp_path), []
    is_there = lease._is_there

    def release_before_the_look(url):
        if url.endswith(".done") and not published:
            published.append(1)
            held.release()
        return is_there(url)

    monkeypatch.setattr(lease, "_is_there", release_before_the_look)
    assert _acquire(tmp_path, published=lambda: bool(published)) is None
    assert not (tmp_path / "leases" / "000002.json").exists()


def test_releasing_does_not_raise_when_the_store_is_down(tmp_path, monkeypatch, caplog):
    """The step has ended; what it published must not be lost over its lease."""
    held = _acquire(tmp_path)

    def down(url, data, **_):
        raise ConnectionError("down")

    monkeypatch.setattr(storage, "create", down)
    held.release()
    assert "000001.done" in caplog.text


def test_a_heartbeat_survives_whatever_the_store_raises(tmp_path, monkeypatch, caplog):
    """A store's client raises errors of its own; the beats go on when it is back."""
    written, beats = storage.write_atomic, []
    again = threading.Event()

    def flaky(url, data, **_):
        beats.append(data)
        if len(beats) < 4:
            raise RuntimeError("not an OSError")
        written(url, data)
        again.set()

    monkeypatch.setattr(storage, "write_atomic", flaky)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    held = _acquire(tmp_path)
    assert again.wait(30)
    held.release()
    assert int((tmp_path / "leases" / "000001.beat").read_text()) >= 4
    assert caplog.text.count("cannot be written") == 1


def test_a_winner_whose_answer_was_lost_knows_its_own_record(tmp_path, monkeypatch):
    """The store took the record and a repeated request was refused: the lease is ours."""
    create = storage.create

    def refused(url, data, **_):
        create(url, data)
        return False

    monkeypatch.setattr(storage, "create", refused)
    held = _acquire(tmp_path, waiting=_never)
    assert held.number == 1
    held.release()


def test_time_in_which_the_observer_slept_is_not_silence(tmp_path, monkeypatch):
    """After a night asleep, the first look does not take over: only watched silence counts."""
    now = [1000.0]
    monkeypatch.setattr(lease.time, "monotonic", lambda: now[0])
    _record(tmp_path, 1, {"host": "elsewhere", "pid": 1})
    observer = lease._Observer(str(tmp_path / "leases" / "000001"))
    assert not observer.free()
    now[0] += 8 * 3600
    assert not observer.free()
    for _ in range(int(lease.STALE_SECONDS)):
        now[0] += 1.0
        last = observer.free()
    assert last


def test_an_owner_that_cannot_be_seen_is_not_gone(monkeypatch):
    """A hidden process, or a record without a start time: the heartbeat decides, not the pid."""
    me = process.this()
    start = me["process_start"]
    assert process.is_gone({**me, "process_start": start - 100})
    assert not process.is_gone(me)
    assert not any(process.is_gone({**me, "process_start": odd}) for odd in ("", None, "1", 1))
    assert not any(process.is_gone({**me, "pid": odd}) for odd in (0, -1, 2**70, True, "1", None))

    def hidden(pid):
        raise psutil.AccessDenied(pid)

    monkeypatch.setattr(process.psutil, "Process", hidden)
    assert not process.is_gone({**me, "process_start": start - 100})


def test_a_live_holder_is_waited_for_until_it_publishes(tmp_path):
    """The second taker waits, is told the holder, and ends with None once the output is there."""
    held, looks, told = _acquire(tmp_path), [], []
    got = _acquire(
        tmp_path, published=lambda: len(looks) > 1 or looks.append(1), waiting=told.append
    )
    assert got is None
    assert told[0]["pid"] == os.getpid()
    held.release()


def test_a_recycled_process_id_is_not_the_holder(tmp_path):
    """A live process with the holder's id but another start time does not hold the lease."""
    owner = {**process.this(), "process_start": 1.0}
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases" / "000001.json").write_text(json.dumps(owner))
    got = _acquire(tmp_path, waiting=_never)
    assert got.number == 2
    got.release()


def test_a_beating_foreign_holder_is_not_taken_over(tmp_path, monkeypatch):
    """As long as the count changes, silence does not begin, whatever any clock says."""
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(process, "this_host", lambda: "elsewhere")
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)
    held = _acquire(tmp_path)
    monkeypatch.setattr(process, "this_host", lambda: "here")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    looks = iter(range(6))
    got = _acquire(tmp_path, published=lambda: next(looks, None) is None)
    assert got is None
    held.release()


def test_the_age_of_a_heartbeat_is_by_the_clock_of_the_store(tmp_path, monkeypatch):
    """Whatever the clock of the machine that looks says."""
    monkeypatch.setattr(process, "this_host", lambda: "elsewhere")
    held = _acquire(tmp_path)
    monkeypatch.setattr(process, "this_host", lambda: "here")
    now = time.time
    for skew in (-3600.0, 3600.0):
        monkeypatch.setattr(time, "time", lambda skew=skew: now() + skew)
        assert lease.holder(str(tmp_path)).responsive
    held.stop()
    for path in (tmp_path / "leases").iterdir():
        os.utime(path, (0, path.stat().st_mtime - 2 * lease.STALE_SECONDS))
    assert not lease.holder(str(tmp_path)).responsive
    assert {path.suffix for path in (tmp_path / "leases").iterdir()} <= {".json", ".beat"}
