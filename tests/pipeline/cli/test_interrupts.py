"""What one and two signals do to a run in this process, and what it asks Ray for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any
from unittest import mock

import pytest

from pipeline import Experiment, Result, StepContext, local, step
from pipeline.cli.stopping import Interrupts
from pipeline.cli.verbs import EXIT_CODES
from pipeline.errors import Cancelled, InputError, Preempted
from pipeline.execute.backend import InlineBackend, InlineWorkers
from pipeline.execute.event_log import EventLog
from pipeline.execute.executor import Execution
from pipeline.graph.step import as_node
from pipeline.store import lease, storage
from pipeline.store.outputs import Store
from tests.pipeline.cli.terminal import Terminal
from tests.pipeline.toy import Numbers, numbers, write_numbers

# Twice in a main thread that no exception gets out of; a child that ignores what it can.
STUCK = """
import signal, subprocess, sys, time
from pipeline.cli.stopping import Interrupts
child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
with Interrupts() as interrupts, interrupts.stopping(lambda: None):
    subprocess.Popen([sys.executable, "-c", child], process_group=0)
    print("\\x1b[?25lready", flush=True)
    while True:
        try:
            time.sleep(0.01)
        except KeyboardInterrupt:
            print("heard", flush=True)
"""


@pytest.mark.slow
def test_a_step_that_waits_for_another_run_is_stopped(tmp_path):
    """Its holder lives on and on; the stop is heard at the next look, the lease is not taken."""
    node = as_node(numbers(count=4))
    root = storage.join(str(tmp_path), node.directory)
    held = lease.acquire(root, published=lambda: False, waiting=lambda _: None)
    log = EventLog(str(tmp_path), "test", [])
    execution = Execution([node], Store(str(tmp_path)), log, "again")
    backend = InlineBackend(log)

    def stop():
        execution.stop()
        backend.stop()

    timer = threading.Timer(0.3, stop)
    timer.start()
    try:
        with pytest.raises(Cancelled):
            execution.run(backend, execution.look())
        assert lease.holder(root).number == held.number == 1
    finally:
        timer.join()
        held.release()
        log.close()


def test_a_gang_here_that_listens_is_asked_to_save():
    """By SIGTERM, to its own handler; one that does not listen is ended."""
    workers, heard = InlineWorkers(), []

    def listens(job, *, process, emit):
        before = signal.signal(signal.SIGTERM, lambda *_: heard.append(job))
        try:
            workers.stop()
        finally:
            signal.signal(signal.SIGTERM, before)
        return "saved"

    def deaf(job, *, process, emit):
        workers.stop()
        return "never"

    assert workers.gang(local(), listens, "job", lambda _: None) == "saved"
    assert heard == ["job"]
    with pytest.raises(KeyboardInterrupt):
        workers.gang(local(), deaf, "job", lambda _: None)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_the_first_signal_asks_to_stop(number, status):
    """Once, without an exception, with the signal's status, which --help lists; then the handlers
    are back."""
    assert f"{status} " in EXIT_CODES
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    asked = []
    with Interrupts() as interrupts:
        with interrupts.stopping(lambda: asked.append(1)):
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        assert (asked, interrupts.status) == ([1], status)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


@step(output=Numbers, version=1)
def preempted_numbers(run: StepContext, *, count: int) -> Result:
    """As training does: saves when SIGTERM comes, and leaves."""
    if "000001" not in run.attempt:
        raise InputError(f"attempt {run.attempt}")
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    os.kill(os.getpid(), signal.SIGTERM)
    while not heard:
        time.sleep(0.01)
    signal.signal(signal.SIGTERM, before)
    raise Preempted(f"preempted after step {count}")


def preempted(count: int = 3) -> Any:
    return preempted_numbers(count=count)


def test_a_plain_kill_that_training_hears_stops_the_run(ponente):
    """In this process, where no other would begin the next attempt."""
    status, out, err = ponente("run", experiment=Experiment(preempted))
    assert status == 143
    assert err.count("stopping: ") == 1
    assert "stopped: preempted after step 3" in out


def test_a_signal_in_a_held_block_counts_after_it():
    """So that a display that is being closed is closed."""
    done = []

    def close():
        with Interrupts() as interrupts:
            with interrupts.held():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
                done.append("closed")
            done.append("more")

    with pytest.raises(KeyboardInterrupt):
        close()
    assert done == ["closed"]


@pytest.mark.slow
def test_twice_ends_whatever_the_main_thread_does():
    """Within seconds, with all it started, the cursor shown, and a word of it."""
    with Terminal([sys.executable, "-c", STUCK]) as terminal:
        deadline = time.monotonic() + 30
        while "ready" not in terminal.text and time.monotonic() < deadline:
            time.sleep(0.02)
        terminal.interrupt()
        time.sleep(0.2)
        assert terminal.process.poll() is None
        terminal.interrupt()
        assert terminal.wait(10) == 130
        assert "heard" in terminal.text
        assert "run it again to resume" in terminal.text
        assert terminal.text.rindex("\x1b[?25h") > terminal.text.rindex("\x1b[?25l")
        assert not terminal.left_after(2)


def test_a_local_ray_is_one_of_its_own():
    """Ray without an address joins any cluster that runs on this machine."""
    from pipeline.execute.ray import backend

    with mock.patch("ray.init") as init:
        backend._start(None)
    assert init.call_args.args == ("local",)


PROGRAM = """
import os, signal, subprocess, sys, threading
from pipeline import Artifact, Experiment, StepContext, step
from pipeline.graph.facts import Facts

def slow_facts(node, results):
    print("planning", flush=True)
    threading.Event().wait(30)
    return Facts()

@step(output=Artifact, version=1, facts=slow_facts)
def planned(run: StepContext, *, n: int = 1) -> dict:
    return {"n": n}

def graph(n: int = 1):
    return planned(n=n)

child = subprocess.Popen(["sleep", "60"])
before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
hook = sys.unraisablehook
try:
    Experiment(graph).run(prefix=sys.argv[1], executor="inline")
except KeyboardInterrupt:
    print("interrupted", flush=True)
threading.Event().wait(3)
after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
left = [t.name for t in threading.enumerate() if not t.name.startswith(("Main", "storage"))]
print("alive", child.poll(), after == before, sys.unraisablehook is hook, left, flush=True)
child.kill()
"""


@pytest.mark.slow
def test_interrupting_a_plan_in_python_ends_nothing_else(tmp_path):
    """The program, its children, its handlers and hooks are as before; no thread is left."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert any("planning" in line for line in program.stdout)
    program.send_signal(signal.SIGINT)
    said = program.stdout.read()
    assert program.wait(30) == 0, said
    assert "interrupted\nalive None True True []" in said


def _press(marks, at):
    for number in at:
        while len(marks) < number:
            time.sleep(0.01)
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize(("times", "error", "kept"), [(1, Cancelled, 2), (2, KeyboardInterrupt, 1)])
def test_a_run_in_python_is_stopped_by_one_and_ended_by_two(tmp_path, times, error, kept):
    """One lets the shard in flight finish; then all is as before, and the next run resumes."""
    marks: list[int] = []

    def write(directory, item):
        marks.append(item)
        time.sleep(0.3)
        return write_numbers(directory, (item, 1))

    @step(output=Numbers, version=1)
    def slow_ones(run: StepContext, *, shards: int) -> Result:
        run.map(write, {f"part/{i}": i for i in range(shards)})
        return {"count": shards}

    def slow(shards: int = 3) -> Any:
        return slow_ones(shards=shards)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    presses = threading.Thread(target=_press, args=(marks, [2] * times))
    presses.start()
    with pytest.raises(error):
        Experiment(slow).run(prefix=str(tmp_path), executor="inline")
    presses.join()
    assert marks == [0, 1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert Experiment(slow).run(prefix=str(tmp_path), executor="inline").result["count"] == 3
    assert marks[2:] == list(range(kept, 3))
