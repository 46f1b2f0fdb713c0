"""A store before any work: one that cannot keep the protocol is refused; what costs is named."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline import doctor
from pipeline.errors import InputError
from pipeline.store import lease, storage, write_check
from pipeline.store.write_check import bucket_warnings, check_writable
from tests.faults import fake_gcs
from tests.faults.fake_gcs import FakeGCS, Faults

ROOT = Path(__file__).parents[3]
EXPERIMENT = """
from pipeline import Experiment
from tests.pipeline.toy import numbers

def counted(count: int = 4):
    return numbers(count=count, shards=2)

experiment = Experiment(counted)
"""
# What a file system without the feature answers, to every process that starts from here.
WITHOUT = {
    "links": "def no(*_, **__): raise OSError({error}, 'not here')\nos.link = no\n",
    "rename": "local_storage._renameat2 = None\n",
    "locks": "def no(*_): raise OSError({error}, 'not here')\nimport fcntl; fcntl.flock = no\n",
}


def without(tmp_path: Path, *features: str, error: str = "errno.EPERM") -> dict[str, str]:
    """The environment of a process whose file system lacks the features."""
    folder = tmp_path / "site"
    folder.mkdir()
    lines = "".join(WITHOUT[name].format(error=error) for name in features)
    begin = "import errno, os\nfrom pipeline.store import local_storage\n"
    (folder / "sitecustomize.py").write_text(begin + lines)
    return {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}


def run(tmp_path: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`ponente run` of a small experiment, inline, in a process of its own."""
    file = tmp_path / "counted.py"
    file.write_text(EXPERIMENT)
    command = [sys.executable, "-m", "pipeline.cli", "run", str(file)]
    command += ["--executor", "inline", "--prefix", "runs"]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_disk_without_hard_links_publishes_by_a_rename_that_replaces_nothing(tmp_path):
    """The run ends well, and the second finds its output."""
    environment = without(tmp_path, "links")
    first = run(tmp_path, environment)
    assert first.returncode == 0, first.stderr
    second = run(tmp_path, environment)
    assert "all 1 steps up to date" in second.stdout, second.stdout + second.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "error", "says"),
    [
        (("links", "rename"), "EPERM", "neither hard links nor"),
        (("locks",), "ENOLCK", "no locks"),
        (("locks",), "ENOSYS", "no locks"),
    ],
)
def test_a_disk_that_cannot_keep_the_protocol_is_refused_before_work(
    tmp_path, features, error, says
):
    """In one line, with the cause and what to do; and nothing was begun."""
    environment = without(tmp_path, *features, error=f"errno.{error}")
    done = run(tmp_path, environment)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}/runs: ")
    assert says in line
    assert "not here" in line
    assert "--prefix" in line
    assert list((tmp_path / "runs").iterdir()) == []


def test_of_racing_creates_without_hard_links_one_wins(tmp_path, monkeypatch):
    """A reader sees the content of the winner, never a part."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    url = str(tmp_path / "x")
    assert storage.create(url, b"first")
    assert not storage.create(url, b"second")
    assert storage.read_bytes(url) == b"first"
    assert os.listdir(tmp_path) == ["x"]


def test_a_store_that_replaces_what_it_should_not_is_refused():
    """As one that keeps S3's protocol without its conditions."""
    from tests.pipeline import fake_stores

    with pytest.MonkeyPatch.context() as patch:
        fake_stores.add_to_buckets(patch)
        for protocol in ("overwrites", "replacesany"):
            with pytest.raises(InputError, match=r"not conditional.*--prefix"):
                check_writable(fake_stores.new(protocol))
        assert "deletes are not conditional" in check_writable(fake_stores.new("deletesany"))


@pytest.mark.slow
def test_a_heartbeat_that_hangs_is_abandoned_for_the_next(monkeypatch):
    """The store never answers one; the next beats are written, and the lease lives."""
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.5)
    with FakeGCS() as server:
        root = "gs://bucket/step"
        held = lease.acquire(root, published=lambda: False, waiting=lambda _: None)
        assert held is not None
        server.faults.latency_seconds = 60.0
        asked = server.requests
        until = time.monotonic() + 30
        while server.requests == asked and time.monotonic() < until:
            time.sleep(0.02)
        server.faults.latency_seconds = 0.0
        name = f"step/leases/{held.number:06d}.beat"
        while name not in server.buckets["bucket"] and time.monotonic() < until:
            time.sleep(0.02)
        assert name in server.buckets["bucket"]
        held.release()


@pytest.mark.parametrize(
    ("location", "machines", "far"),
    [
        ("us-east1", "us-east5", True),
        ("us", "us-east5", False),
        ("eu", "us-east5", True),
        ("nam4", "us-east5", False),
        ("us-east1", "", False),
    ],
)
def test_a_bucket_in_another_region_is_named(monkeypatch, location, machines, far):
    """Regions are compared, continents too; what is unknown is not warned of."""
    monkeypatch.setattr(write_check, "_about", lambda url: {"location": location.upper()})
    warnings = bucket_warnings("gs://bucket/runs", machines)
    assert bool(warnings) == far
    if far:
        assert location in warnings[0]
        assert machines in warnings[0]


def test_the_bucket_says_where_it_is():
    """As Google's JSON API has it; a local store has no location."""
    with FakeGCS():
        assert "is in us-central1" in bucket_warnings("gs://bucket/runs", "us-east5")[0]
        assert bucket_warnings("gs://bucket/runs", "us-central1") == []
    assert bucket_warnings("./runs", "us-east5") == []


@pytest.mark.parametrize(("seconds", "days"), [("604800", "7"), ("0", "")])
def test_a_bucket_that_keeps_deleted_objects_is_named_with_the_command(monkeypatch, seconds, days):
    """By launch and by doctor, which passes the store otherwise; not where that is off."""
    monkeypatch.setattr(
        fake_gcs, "BUCKET_FACTS", {"softDeletePolicy": {"retentionDurationSeconds": seconds}}
    )
    with FakeGCS():
        found = doctor.store("gs://bucket/runs")
        (*advice,) = bucket_warnings("gs://bucket/runs", "us-central1")
    assert found.status == ("warn" if days else "ok")
    assert [found.advice] == (advice or [""])
    if days:
        assert f"for {days} more days" in found.advice
        assert "gcloud storage buckets update gs://bucket --clear-soft-delete" in found.advice


def test_a_bucket_that_is_far_away_is_given_time():
    """More than a second for the first answer, which needs a connection, is no failure."""
    with FakeGCS() as server:
        server.faults.latency_seconds = 1.3
        warm = threading.Timer(1.0, setattr, (server.faults, "latency_seconds", 0.0))
        warm.start()
        check_writable("gs://bucket/runs")
        assert not server.buckets["bucket"]


def test_a_bucket_that_is_slow_to_wake_is_asked_again():
    """Half of the answers are lost."""
    with FakeGCS() as server:
        server.faults = Faults(0.3, kinds=("503", "reset", "429"), seed=4)
        check_writable("gs://bucket/runs")
