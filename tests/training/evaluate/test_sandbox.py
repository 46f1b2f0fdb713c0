"""Hostile programs stay in the sandbox, and where there can be none, nothing is run."""

import contextlib
import subprocess
import threading
import time

import psutil
import pytest

from pipeline.errors import InputError
from tests.faults.hostile_programs import LIMITS, PROGRAMS, attack, was_kept_in
from training.evaluate.programs import sandbox


@pytest.fixture(scope="module")
def possible():
    try:
        sandbox.check(sandbox.Limits())
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture
def bystander():
    """A process that no program may end."""
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("hostile", PROGRAMS, ids=lambda hostile: hostile.tries)
def test_a_hostile_program_is_kept_in(hostile, possible, bystander):
    """It ends as it must, nothing of it is left, and what was beside it lives."""
    outcome = attack(hostile, bystander.pid)
    assert was_kept_in(hostile, outcome), outcome
    assert len(outcome.output) <= LIMITS.output
    assert bystander.poll() is None
    left = [p for p in psutil.process_iter(["cmdline"]) if "main.py" in (p.info["cmdline"] or ())]
    _, alive = psutil.wait_procs(left, timeout=30)  # another test's programs end by themselves
    assert alive == []


def test_without_bubblewrap_nothing_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="apt-get install bubblewrap"):
        sandbox.run({}, [["/bin/sh", "-c", f"touch {tmp_path}/ran"]], sandbox.Limits())
    assert not (tmp_path / "ran").exists()


def test_without_namespaces_nothing_runs(monkeypatch):
    """What was said instead of a start is in the error, with what to allow."""
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: "/bin/ls")
    with pytest.raises(InputError, match=r"did not start.*unrecognized option.*user namespaces"):
        sandbox.run({}, [["/bin/true"]], sandbox.Limits())


@pytest.mark.slow
def test_a_sandbox_that_is_killed_has_not_passed(possible):
    """As the kernel does when memory runs out: the command that was running has no exit status."""
    found = []

    def kill() -> None:
        while not found:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if process.cmdline() == ["/bin/sleep", "50"]:
                        found.append(process.parent())
                        found[0].kill()
            time.sleep(0.02)

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = sandbox.run({}, [["/bin/true"], ["/bin/sleep", "50"]], sandbox.Limits(seconds=20))
    found.append(None)
    killer.join()
    assert outcome.ended == ["exit 0", "killed"]


def test_limits_that_leave_no_room_are_refused(possible):
    with pytest.raises(InputError, match="raise the limits"):
        sandbox.check(sandbox.Limits(memory=1 << 16))
    with pytest.raises(InputError, match="seconds"):
        sandbox.Limits(seconds=0)
