"""Hostile programs stay in the sandbox, and where there can be none, nothing is run."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from pipeline.errors import InputError
from tests.faults.hostile_programs import LIMITS, PROGRAMS, attack, was_kept_in
from training.evaluate.programs import sandbox

pytestmark = pytest.mark.slow  # several processes each, and some run until their time is over

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def layers():
    try:
        return sandbox.check(sandbox.Limits())
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture
def bystander():
    """A process that no program may end."""
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("hostile", PROGRAMS, ids=lambda hostile: hostile.tries)
def test_a_hostile_program_is_kept_in(hostile, layers, bystander):
    """It ends as it must, nothing of it is left, and what was beside it lives."""
    if hostile.needs_filter and "system call filter" not in layers:
        pytest.skip("libseccomp is not installed")
    outcome = attack(hostile, bystander.pid)
    assert was_kept_in(hostile, outcome), outcome
    assert len(outcome.output) <= LIMITS.output
    assert bystander.poll() is None
    left = [p for p in psutil.process_iter(["cmdline"]) if "main.py" in (p.info["cmdline"] or ())]
    _, alive = psutil.wait_procs(left, timeout=30)  # another test's programs end by themselves
    assert alive == []


def test_the_table_holds_all_kinds_of_ends():
    """A sandbox that ends everything in one way would not pass."""
    ends = {hostile.ended for hostile in PROGRAMS}
    assert ends == {"time", "output", "memory", "exit 0", "exit 1"}


def test_without_namespaces_nothing_runs(tmp_path, layers):
    """In a user namespace that allows no other, the kernel refuses, and that is the error."""
    code = (
        "from training.evaluate.programs.sandbox import Limits, run\n"
        f"run({{}}, [['/bin/sh', '-c', 'touch {tmp_path}/ran']], Limits())"
    )
    shell = f'echo 0 > /proc/sys/user/max_user_namespaces && exec "{sys.executable}" -c "{code}"'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", shell],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "InputError: sandbox: this kernel does not let a user" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_sandbox_that_is_killed_has_not_passed(layers):
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


def test_limits_that_leave_no_room_are_refused(layers):
    """Rather than every program failing under them."""
    with pytest.raises(InputError, match="raise the limits"):
        sandbox.check(sandbox.Limits(memory=1 << 16))
    with pytest.raises(InputError, match="seconds"):
        sandbox.Limits(seconds=0)
