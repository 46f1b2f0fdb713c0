"""`ponente doctor`: what each check finds, deadlines, exceptions, secrets, and its lines."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import socket
import sys
import threading

import pytest

from pipeline import doctor
from pipeline.doctor import CHECKS, Finding, clean, examine, judge_devices
from pipeline.store import storage
from tests.pipeline.fake_stores import add_to_buckets, new


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No setting of the machine reaches a check, and the stores that imitate others are known."""
    add_to_buckets(monkeypatch)
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)


def test_a_hanging_check_ends_at_its_deadline():
    """The others answer, and nothing waits for the one that hangs."""
    release = threading.Event()

    def hang(_: str) -> Finding:
        release.wait()
        return Finding("hangs", "ok", "")

    def good(prefix: str) -> Finding:
        return Finding("good", "ok", prefix)

    try:
        findings = examine("x", {"hangs": (hang, 0.2), "good": (good, 30.0)})
    finally:
        release.set()
    assert [(f.name, f.status) for f in findings] == [("hangs", "fail"), ("good", "ok")]
    assert "0.2 s" in findings[0].found


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(3)])
def test_whatever_a_check_raises_is_its_finding(error, caplog):
    """No traceback, also in the log of a library; logs are back afterwards."""

    def broken(_: str) -> Finding:
        logging.getLogger("other.package").error("a page of traceback")
        raise error

    (finding,) = examine("x", {"a": (broken, 30.0)})
    logging.getLogger("other.package").error("afterwards")
    assert (finding.name, finding.status) == ("a", "fail")
    assert type(error).__name__ in finding.found
    assert [record.message for record in caplog.records] == ["afterwards"]


@pytest.mark.parametrize(
    ("secret", "line"),
    [
        ("s3cr3t-value", "ray replied s3cr3t-value\nis wrong"),
        ("me:pass", "https://me:pass@host/x"),
        ("ya29.abcdefgh", "Authorization: Bearer ya29.abcdefgh"),
    ],
)
def test_secrets_are_removed_from_every_line(secret, line, monkeypatch):
    """Values of secret variables, passwords of URLs and bearer tokens, and nothing else."""
    monkeypatch.setenv("MY_API_TOKEN", "s3cr3t-value")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/tmp")
    found = clean(line)
    assert secret not in found
    assert "***" in found
    assert "\n" not in found
    assert clean("/tmp/x at gs://bucket/runs") == "/tmp/x at gs://bucket/runs"


def test_lines_are_aligned_with_advice_below():
    """One line per finding; advice only where something is to be done."""
    good = Finding("a", "ok", "fine", "not shown")
    assert doctor.lines([good]) == ["ok    a  fine", "1 checks: nothing to do"]
    findings = [good, Finding("longer", "warn", "odd", "do this"), Finding("b", "fail", "bad")]
    assert doctor.lines(findings) == [
        "ok    a       fine",
        "warn  longer  odd",
        "              do this",
        "fail  b       bad",
        "3 checks: 1 failed, 1 warnings",
    ]


@pytest.mark.parametrize(
    ("lines", "python", "status", "says"),
    [
        (["pytest>=1", "fsspec"], ">=3.9", "ok", "2 packages"),
        (["pytest<1", "fsspec"], ">=3.9", "fail", "pytest"),
        (["no-such-package>=1"], ">=3.9", "fail", "no-such-package is missing (>=1)"),
        (["no-such-package; extra == 'tpu'", "fsspec"], ">=3.9", "ok", "1 packages"),
        (["pytest<1; sys_platform == 'nowhere'"], ">=3.9", "ok", "0 packages"),
        ([], ">=4", "fail", f"Python {platform.python_version()} is not >=4"),
    ],
)
def test_packages_are_compared_with_the_requirements(lines, python, status, says, monkeypatch):
    """Missing and other versions; extras are optional; markers are honoured."""
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: lines)
    monkeypatch.setattr(importlib.metadata, "metadata", lambda _: {"Requires-Python": python})
    finding = doctor.packages("")
    assert finding.status == status
    assert says in finding.found


CPU = {"platform": "cpu", "kind": "cpu", "count": 8, "memory": None, "jax": "0.10.2"}
TPU = {**CPU, "platform": "tpu", "kind": "TPU v6 lite", "count": 4, "memory": 32 * 2**30}


@pytest.mark.parametrize(
    ("listed", "shown", "platforms", "status", "says"),
    [
        (CPU, "", "", "ok", "8 x cpu (cpu), jax 0.10.2"),
        (TPU, "4 x TPU", "", "ok", "4 x TPU v6 lite (tpu), jax 0.10.2, 32.0 GiB each, 918 TFLOP/s"),
        ({**TPU, "kind": "TPU v99"}, "4 x TPU", "", "warn", "MFU is not shown"),
        (CPU, "4 x TPU", "", "warn", "JAX does not see: 4 x TPU"),
        (CPU, "1 x NVIDIA GPU", "cpu", "warn", "JAX_PLATFORMS=cpu leaves it out"),
    ],
)
def test_an_accelerator_that_jax_does_not_see_is_a_warning(listed, shown, platforms, status, says):
    finding = judge_devices(listed, shown, platforms)
    assert finding.status == status
    assert says in f"{finding.found} {finding.advice}"


@pytest.mark.slow
def test_jax_lists_its_devices_in_a_process_of_its_own(monkeypatch):
    """As the environment says, and without jax in this process's way."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    assert doctor.devices("").found.startswith("3 x cpu (cpu)")


@pytest.mark.slow
def test_a_process_that_does_not_answer_or_fails_is_a_finding(monkeypatch):
    """A hanging jax is a warning, one that does not start is a failure."""
    monkeypatch.setattr(doctor, "_DEVICE_SECONDS", 0.5)
    monkeypatch.setattr(doctor, "_ASK_JAX", "import time; time.sleep(600)")
    assert doctor.devices("").status == "warn"
    monkeypatch.setattr(doctor, "_DEVICE_SECONDS", 60.0)
    monkeypatch.setattr(doctor, "_ASK_JAX", "raise SystemExit('no plugin')")
    assert "jax does not start: no plugin" in doctor.devices("").found
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert doctor.devices("").found == "jax does not start: exit status 1"


@pytest.mark.parametrize("kind", ["local", "new", "fakestore"])
def test_a_good_store_passes_and_is_left_as_it_was(kind, tmp_path):
    """Not one object more than before, and no folder that was not there."""
    (tmp_path / "keep").write_text("me")
    new_folder = str(tmp_path / "a" / "b")
    prefix = {"local": str(tmp_path), "new": new_folder, "fakestore": new("fakestore")}[kind]
    assert doctor.store(prefix).status == "ok"
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]
    assert list(storage.list_files(prefix)) == ([("keep", 2)] if kind == "local" else [])


@pytest.mark.parametrize(
    ("protocol", "says"),
    [
        ("overwrites", "second create"),
        ("sftp", "no conditional write"),
        ("listslate", "listing lacks"),
        ("keepsold", "overwritten object"),
        ("neverdeletes", "still shows deleted"),
        ("denies", "PermissionError: 403"),
    ],
)
def test_a_store_that_would_lose_outputs_fails(protocol, says):
    (finding,) = examine(new(protocol), {"store": CHECKS["store"]})
    assert finding.status == "fail"
    assert says in finding.found
    assert "hunter2" not in finding.found


def test_a_cluster_is_asked_for_a_connection(monkeypatch):
    """One that listens is fine; one that does not, or whose address is none, fails."""
    assert "RAY_ADDRESS is not set" in doctor.ray("").found
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{port}")
        assert "accepts connections" in doctor.ray("").found
    for address in (f"127.0.0.1:{port}", "host:port", "a:70000"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert doctor.ray("").status == "fail"
