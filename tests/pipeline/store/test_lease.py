"""Leases: one holder at a time, dead holders noticed, no wall clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from pipeline.store import lease, process


def _acquire(root, **changes):
    arguments = {"published": lambda: False, "waiting": lambda holder: None, **changes}
    return lease.acquire(str(root), **arguments)


def _never(holder):
    raise AssertionError(f"had to wait for {holder}")


def test_a_live_holder_is_waited_for_until_it_publishes(tmp_path):
    """The second taker waits, is told the holder, and ends with None once the output is there."""
    held, looks, told = _acquire(tmp_path), [], []
    got = _acquire(
        tmp_path, published=lambda: len(looks) > 1 or looks.append(1), waiting=told.append
    )
    assert got is None
    assert told[0]["pid"] == os.getpid()
    held.release()


def test_a_dead_holder_on_this_host_is_noticed_at_once(tmp_path):
    """A process that was killed with the lease in its hands does not delay the next one."""
    script = (
        "from pipeline.store import lease; import os, signal;"
        f"lease.acquire({str(tmp_path)!r}, published=lambda: False, waiting=print);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script], check=False)
    got = _acquire(tmp_path, waiting=_never)
    assert got.number == 2
    got.release()


def test_a_recycled_process_id_is_not_the_holder(tmp_path):
    """A live process with the holder's id but another start time does not hold the lease."""
    owner = {**process.this(), "process_start": 1.0}
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases" / "000001.json").write_text(json.dumps(owner))
    got = _acquire(tmp_path, waiting=_never)
    assert got.number == 2
    got.release()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"host": "elsewhere", "pid": 1}', "\0"]
)
def test_torn_and_foreign_leases_are_taken_over_after_silence(tmp_path, monkeypatch, content):
    """A lease nobody can be asked about goes by its heartbeat's silence, never wedges."""
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.2)
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases" / "000003.json").write_text(content)
    got = _acquire(tmp_path)
    assert got.number == 4
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
