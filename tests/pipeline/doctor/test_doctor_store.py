"""The doctor on stores: good ones pass and are left as they were, broken promises are named."""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import time
import uuid

import pytest

from pipeline.doctor import CHECKS, examine, main_lines, store
from pipeline.store import storage
from tests.pipeline.store.fake_stores import FakeStore, new

STORE = [check for check in CHECKS if check.name in ("bucket", "store", "clock", "disk")]


@pytest.mark.parametrize("kind", ["local", "new", "memory", "fakestore"])
def test_a_good_store_passes_and_is_left_as_it_was(kind, tmp_path):
    """Nothing failed, nothing to look at, and not one object more than before."""
    (tmp_path / "keep").write_text("me")
    prefix = {
        "local": str(tmp_path),
        "new": str(tmp_path / "a" / "b"),
        "memory": f"memory://{uuid.uuid4().hex}",
        "fakestore": new("fakestore"),
    }[kind]
    findings = examine(prefix, STORE)
    assert [f.name for f in findings] == ["bucket", "store", "clock", "disk"]
    assert [
        f for f in findings if f.status == "fail" or (f.name != "disk" and f.status != "ok")
    ] == []
    assert "ms an operation" in findings[1].found
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]
    assert list(storage.list_files(prefix)) == ([("keep", 2)] if kind == "local" else [])


@pytest.mark.parametrize(
    ("protocol", "says"),
    [
        ("overwrites", "second create"),
        ("lostrace", "racing creates"),
        ("refuses", "no conditional create"),
        ("listslate", "listing does not show"),
        ("keepsold", "overwritten object"),
        ("neverdeletes", "still shows deleted"),
        ("denies", "create an object: PermissionError: 403"),
    ],
)
def test_a_store_that_would_lose_outputs_fails(protocol, says):
    """Each broken promise is named, and the exit status is 1."""
    finding = store.store(new(protocol))
    assert finding.status == "fail"
    assert says in finding.found
    assert main_lines([finding])[1] == 1


def test_a_prefix_that_is_no_directory_fails(tmp_path):
    """A file is where the store should be; it stays as it was."""
    path = tmp_path / "runs"
    path.write_text("a file")
    finding = store.store(str(path))
    assert finding.status == "fail"
    assert "cannot create an object" in finding.found
    assert path.read_text() == "a file"


def test_a_read_only_disk_fails_with_the_reason(tmp_path, monkeypatch):
    """What the system says is in the line; permissions do not bind root, so it is made up."""

    def refuse(path, *_, **__):
        raise OSError(30, "Read-only file system", path)

    monkeypatch.setattr(os, "makedirs", refuse)
    finding = store.store(str(tmp_path / "runs"))
    assert finding.status == "fail"
    assert "Read-only file system" in finding.found
    assert finding.advice


def test_a_denied_bucket_fails_without_its_secrets():
    """The reason is there, the password and the token are not; the store is not tried."""
    lines, status = main_lines(examine(new("denies"), STORE))
    text = "\n".join(lines)
    assert status == 1
    assert "403" in text
    assert "hunter2" not in text
    assert "abcdefgh123" not in text
    assert "not looked at, because of bucket" in text
    assert sum(line.startswith("fail") for line in lines) == 1


@pytest.mark.parametrize("form", ["http://127.0.0.1:{}", "127.0.0.1:{}"])
def test_a_bucket_whose_servers_do_not_answer_fails_without_trying_to_log_in(form, monkeypatch):
    """A closed port is the finding, before any library looks for credentials."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", form.format(free.getsockname()[1]))
        monkeypatch.setattr(storage, "filesystem", lambda url: pytest.fail(url))
        monkeypatch.setattr("urllib.request.getproxies", dict)
        findings = examine("gs://bucket/runs", STORE)
    assert [f.status for f in findings] == ["fail", "warn", "warn", "ok"]
    assert "refused" in findings[0].found


@pytest.mark.parametrize(("name", "status"), [("mine", "ok"), ("yours", "fail")])
def test_a_missing_bucket_is_told_from_an_empty_prefix(name, status):
    """Both list as nothing; only one of them has a bucket."""
    finding = store.bucket(f"buckets://{name}/runs")
    assert finding.status == status
    assert (f"no bucket '{name}'" in finding.found) == (status == "fail")


@pytest.mark.parametrize(("offset", "status"), [(0, "ok"), (4, "ok"), (60, "warn"), (-60, "warn")])
def test_a_clock_that_is_off_is_a_warning(offset, status, monkeypatch):
    """More than five seconds, either way, and it says that nothing is decided by it."""

    def modified(self, path):
        assert self.exists(path)
        return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=offset)

    monkeypatch.setattr(FakeStore, "modified", modified)
    finding = store.clock(new("fakestore"))
    assert finding.status == status
    if status == "warn":
        assert f"60 s {'behind' if offset > 0 else 'ahead of'} the store" in finding.found
        assert "no decision depends on it" in finding.advice


def test_a_clock_of_a_naive_time_is_taken_as_utc(monkeypatch):
    """Some stores leave the zone out."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        monkeypatch.setattr(
            FakeStore,
            "modified",
            lambda *_: datetime.datetime.now(datetime.UTC).replace(tzinfo=None),
        )
        assert store.clock(new("fakestore")).status == "ok"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_store_without_times_has_no_clock_to_compare(monkeypatch):
    """Not an error."""

    def modified(*_):
        raise NotImplementedError

    monkeypatch.setattr(FakeStore, "modified", modified)
    assert store.clock(new("fakestore")).status == "ok"


@pytest.mark.parametrize(("free", "status"), [(10**8, "fail"), (10**10, "warn"), (10**12, "ok")])
def test_disk_space(free, status, tmp_path, monkeypatch):
    """Of the disk that a prefix yet to be made will be on."""
    asked = []

    def usage(path):
        asked.append(str(path))
        return shutil._ntuple_diskusage(free * 2, free, free)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert store.disk(str(tmp_path / "a" / "b")).status == status
    assert asked == [str(tmp_path)]
