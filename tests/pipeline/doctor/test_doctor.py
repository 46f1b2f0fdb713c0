"""`ponente doctor`: deadlines, exceptions, order, secrets, and the lines it prints."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.doctor import CHECKS, examine, main_lines
from pipeline.doctor.finding import Check, Finding, ask, clean
from tests.pipeline.store.fake_stores import new


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """No setting of the machine reaches a check; nobody's home is looked into."""
    for name in list(os.environ):
        if name.startswith(("RAY_", "HF_", "TRANSFORMERS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_a_hanging_check_is_given_up_at_its_deadline():
    """The others answer, the hung one fails, and nothing waits for it."""
    release = threading.Event()

    def hang(_: str) -> Finding:
        release.wait()
        return Finding("hangs", "ok", "")

    checks = [
        Check("hangs", hang, seconds=0.2),
        Check("hangs too", hang, seconds=0.2),
        Check("good", lambda prefix: Finding("good", "ok", prefix)),
    ]
    try:
        findings = examine("x", checks)
    finally:
        assert not release.is_set()
        release.set()
    assert [(f.name, f.status) for f in findings] == [
        *(("hangs", "fail"), ("hangs too", "fail"), ("good", "ok"))
    ]
    assert "0.2 s" in findings[0].found


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(3), KeyboardInterrupt()])
def test_a_check_that_raises_fails_and_the_others_go_on(error):
    """Also what is no Exception; the check's own name stays."""

    def broken(_: str) -> Finding:
        raise error

    findings = examine("x", [Check("a", broken), Check("b", lambda _: Finding("b", "ok", ""))])
    assert [(f.name, f.status) for f in findings] == [("a", "fail"), ("b", "ok")]
    assert type(error).__name__ in findings[0].found


def test_a_check_is_not_made_after_one_it_needs_failed():
    """The store of a bucket that does not answer is not tried; no second failure is counted."""
    made = []

    def look(name: str, status):
        return lambda _: made.append(name) or Finding(name, status, "")

    checks = [
        Check("bucket", look("bucket", "fail")),
        Check("store", look("store", "ok"), after="bucket"),
        Check("disk", look("disk", "warn")),
        Check("clock", look("clock", "ok"), after="disk"),
    ]
    findings = examine("x", checks)
    assert [f.status for f in findings] == ["fail", "warn", "warn", "ok"]
    assert sorted(made) == ["bucket", "clock", "disk"]


def test_libraries_are_silent_while_checks_run_and_speak_again_after(caplog):
    """A page of traceback in a log does not come between the lines."""
    seen = []

    def look(_: str) -> Finding:
        logging.getLogger("other.package").error("a page of traceback")
        seen.append(len(caplog.records))
        return Finding("a", "ok", "")

    examine("x", [Check("a", look)])
    logging.getLogger("other.package").error("afterwards")
    assert seen == [0]
    assert [r.message for r in caplog.records] == ["afterwards"]


def test_a_process_that_hangs_is_killed_with_its_children(tmp_path):
    """Neither it nor a child that holds the pipe open is left."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    status, out, _ = ask([sys.executable, "-c", code], 1.5)
    assert status is None
    child = int(out)
    for _ in range(100):
        stat = Path(f"/proc/{child}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the child is alive")


@pytest.mark.parametrize(
    ("secret", "line"),
    [
        ("s3cr3t-value", "ray said s3cr3t-value\nis wrong"),
        ("pass/word", "https://me:pass@host/x"),
        ("abc123def", "GET /o?X-Goog-Signature=abc123def&x=1"),
        ("ya29.abcdefgh", "Authorization: Bearer ya29.abcdefgh"),
    ],
)
def test_secrets_are_removed_from_every_line(secret, line, monkeypatch):
    """Values of secret variables, passwords of URLs, signatures and bearer tokens."""
    monkeypatch.setenv("MY_API_TOKEN", "s3cr3t-value")
    found = clean(line)
    assert secret not in found
    assert "pass@" not in found
    assert "***" in found
    assert "\n" not in found


def test_what_is_no_secret_stays(monkeypatch, tmp_path):
    """A path to a credential is shown, for it is what has to be mended."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    line = f"{tmp_path} at gs://bucket/runs and https://host:80/a?b=c"
    assert clean(line) == line


def test_lines_are_aligned_with_advice_below_and_a_status():
    """One line a finding; advice only where something is to be done; 1 only for a failure."""
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
        "3 checks: 1 failed, 1 to look at",
    ]


def test_every_check_says_its_own_name():
    """The name in the list is the one in the finding, and no two are the same."""
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names) == 12
    quick = [c for c in CHECKS if c.name not in ("devices", "ray", "hub")]
    assert [f.name for f in examine(new("fakestore"), quick)] == [c.name for c in quick]
