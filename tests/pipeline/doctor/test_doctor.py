"""`ponente doctor`: what each check finds, deadlines, exceptions, secrets, and its lines."""

from __future__ import annotations

import http.server
import logging
import os
import socket
import sys
import threading
import uuid

import pytest

from pipeline.doctor import CHECKS, Finding, checks, clean, examine, main_lines
from pipeline.store import storage
from tests.pipeline.doctor.fake_stores import add_to_buckets, new


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No setting of the machine reaches a check, and the stores that imitate others are known."""
    add_to_buckets(monkeypatch)
    for name in list(os.environ):
        if name.startswith(("RAY_", "HF_", "TRANSFORMERS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture
def closed_port():
    """A port on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield free.getsockname()[1]


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
        assert not release.is_set()
        release.set()
    assert [(f.name, f.status) for f in findings] == [("hangs", "fail"), ("good", "ok")]
    assert "0.2 s" in findings[0].found


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(3), KeyboardInterrupt()])
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


def test_lines_are_aligned_with_advice_below_and_a_status():
    """One line per finding; advice only where something is to be done; 1 only for a failure."""
    good = Finding("a", "ok", "fine", "not shown")
    odd = Finding("longer", "warn", "odd", "do this")
    bad = Finding("b", "fail", "bad", "do that")
    assert main_lines([good]) == (["ok    a  fine", "1 checks, nothing to do"], 0)
    assert main_lines([good, odd])[1] == 0
    lines, status = main_lines([good, odd, bad])
    assert status == 1
    assert lines == [
        "ok    a       fine",
        "warn  longer  odd",
        "              do this",
        "fail  b       bad",
        "              do that",
        "3 checks: 1 failed, 1 warnings",
    ]


def test_every_check_answers_under_its_own_name():
    """On this machine and a good store; jax is asked in another test."""
    quick = {name: check for name, check in CHECKS.items() if name != "devices"}
    assert [f.name for f in examine(new("fakestore"), quick)] == list(quick)


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 10), "fail"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "fail")],
)
def test_python_versions(version, status, monkeypatch):
    """3.11 to 3.13."""
    monkeypatch.setattr(sys, "version_info", (*version, 1, "final", 0))
    assert checks.python("").status == status


@pytest.mark.parametrize(
    ("lines", "status", "says"),
    [
        (["pytest>=1", "fsspec"], "ok", "2 packages"),
        (["pytest<1", "fsspec"], "fail", "pytest"),
        (["no-such-package>=1"], "fail", "no-such-package is missing (>=1)"),
        (["no-such-package; extra == 'tpu'", "fsspec"], "ok", "1 packages"),
        (["pytest<1; sys_platform == 'nowhere'"], "ok", "0 packages"),
    ],
)
def test_packages_are_compared_with_the_requirements(lines, status, says, monkeypatch):
    """Missing and foreign versions; extras are optional; markers are honoured."""
    monkeypatch.setattr("importlib.metadata.requires", lambda _: lines)
    finding = checks.packages("")
    assert finding.status == status
    assert says in finding.found


CPU = {"platform": "cpu", "kind": "cpu", "count": 8, "memory": None, "jax": "0.10.2"}
TPU = {**CPU, "platform": "tpu", "kind": "TPU v6 lite", "count": 4, "memory": 32 * 2**30}


@pytest.mark.parametrize(
    ("listed", "shown", "platforms", "status", "says"),
    [
        (CPU, "", "", "ok", "8 x cpu (cpu), jax 0.10.2"),
        (TPU, "4 x TPU", "", "ok", "4 x TPU v6 lite (tpu), jax 0.10.2, 32.0 GiB each, 918 TFLOP/s"),
        (TPU, "4 x TPU", "", "ok", "an hour costs $10.80 on demand, $2.16 spot (us-central1"),
        ({**TPU, "kind": "TPU v4"}, "4 x TPU", "", "ok", "275 TFLOP/s each"),
        ({**TPU, "kind": "TPU v99"}, "4 x TPU", "", "warn", "MFU is not shown"),
        (CPU, "4 x TPU", "", "warn", "JAX does not see: 4 x TPU"),
        (CPU, "1 x NVIDIA GPU", "cpu", "warn", "JAX_PLATFORMS=cpu leaves it out"),
    ],
)
def test_an_accelerator_that_jax_does_not_see_is_a_warning(listed, shown, platforms, status, says):
    """With the remedy that fits the cause."""
    finding = checks.judge_devices(listed, shown, platforms)
    assert finding.status == status
    assert says in f"{finding.found} {finding.advice}"


def test_prices_that_cannot_be_read_are_a_warning(monkeypatch):
    """The devices are there all the same."""
    monkeypatch.setenv("PONENTE_PRICES", "/nowhere/prices.toml")
    finding = checks.judge_devices(TPU, "4 x TPU", "")
    assert finding.status == "warn"
    assert finding.advice.startswith("PONENTE_PRICES=/nowhere/prices.toml: expected a table")


def test_jax_lists_its_devices_in_a_process_of_its_own(monkeypatch):
    """As the environment says, and without jax in this process's way."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    assert checks.devices("").found.startswith("3 x cpu (cpu)")


def test_a_process_that_does_not_answer_or_fails_is_a_finding(monkeypatch):
    """A hanging jax is a warning, one that does not start and a missing Ray are failures."""
    monkeypatch.setattr(checks, "DEVICE_SECONDS", 0.5)
    monkeypatch.setattr(checks, "_ASK_JAX", "import time; time.sleep(600)")
    assert checks.devices("").status == "warn"
    monkeypatch.setattr(checks, "DEVICE_SECONDS", 60.0)
    monkeypatch.setattr(checks, "_ASK_JAX", "raise SystemExit('no plugin')")
    assert "jax does not start: no plugin" in checks.devices("").found
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert checks.ray("").found == "does not import: exit status 1"


@pytest.mark.parametrize("kind", ["local", "new", "memory", "fakestore"])
def test_a_good_store_passes_and_is_left_as_it_was(kind, tmp_path):
    """Not one object more than before, and no folder that was not there."""
    (tmp_path / "keep").write_text("me")
    prefix = {
        "local": str(tmp_path),
        "new": str(tmp_path / "a" / "b"),
        "memory": f"memory://{uuid.uuid4().hex}",
        "fakestore": new("fakestore"),
    }[kind]
    assert checks.store(prefix).status == "ok"
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]
    assert list(storage.list_files(prefix)) == ([("keep", 2)] if kind == "local" else [])


@pytest.mark.parametrize(
    ("protocol", "says"),
    [
        ("overwrites", "second create"),
        ("replacesany", "not conditional"),
        ("deletesany", "not conditional"),
        ("sftp", "no conditional write"),
        ("listslate", "listing lacks"),
        ("keepsold", "overwritten object"),
        ("neverdeletes", "still shows deleted"),
        ("denies", "PermissionError: 403"),
    ],
)
def test_a_store_that_would_lose_outputs_fails(protocol, says):
    """Each broken promise is named, without secrets."""
    (finding,) = examine(new(protocol), {"store": CHECKS["store"]})
    assert finding.status == "fail"
    assert says in finding.found
    assert "hunter2" not in finding.found


def test_a_prefix_that_is_no_directory_fails(tmp_path):
    """A file is where the store should be; it stays as it was."""
    path = tmp_path / "runs"
    path.write_text("a file")
    assert checks.store(str(path)).status == "fail"
    assert path.read_text() == "a file"


@pytest.fixture
def hub():
    """A hub on this machine; `status` is what it answers."""

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(self.server.status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("status", "expected"), [(200, "ok"), (401, "ok"), (503, "warn")])
def test_a_hub_that_answers(hub, status, expected, monkeypatch):
    """Any answer but a failure of its own is an answer."""
    hub.status = status
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}/")
    assert checks.hub("").status == expected


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:{}", "not a url", "http://[bad"])
def test_a_hub_that_does_not_answer_is_a_warning(endpoint, closed_port, monkeypatch):
    """Unless the user chose to be offline."""
    monkeypatch.setenv("HF_ENDPOINT", endpoint.format(closed_port))
    assert checks.hub("").status == "warn"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert checks.hub("").status == "ok"


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "host:port", "a:70000"])
def test_a_cluster_that_cannot_be_reached_fails(address, closed_port, monkeypatch):
    """Also one whose address is none."""
    monkeypatch.setenv("RAY_ADDRESS", address.format(closed_port))
    monkeypatch.setattr(checks, "_run", lambda *_: _Done())
    assert checks.ray("").status == "fail"


def test_a_cluster_that_listens_is_fine(hub, monkeypatch):
    """Only a connection is asked for."""
    monkeypatch.setenv("RAY_ADDRESS", f"ray://127.0.0.1:{hub.server_port}")
    monkeypatch.setattr(checks, "_run", lambda *_: _Done())
    assert "accepts connections" in checks.ray("").found


class _Done:
    """A Ray that imports, without the seconds that takes."""

    returncode, stdout, stderr = 0, "2.60.0\n", ""
