"""The watchdog, which ends a silent process, and SIGTERM, which asks one to leave."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from data.cache import shard_io
from training import fault
from training.fault import EXIT_CODE, FACTOR, LEAST, PATIENCE, StopSignal, Watchdog


class Clock:
    """A clock that is set."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def limit(dog):
    return dog._timeout(dog._heartbeat)


class Board(dict):
    """A board between watchdogs of this process, which counts what is written."""

    def __init__(self):
        super().__init__()
        self.written = Counter()

    def put(self, name, text):
        self[name] = text
        self.written[name] += 1

    def all(self):
        return dict(self)


@pytest.fixture
def made():
    """A watchdog that is not started, and its clock."""
    clock = Clock()
    return Watchdog(10.0, clock=clock), clock


def test_between_steps_the_limit_follows_their_median(made):
    """Before LEAST steps the patience of a phase holds; then FACTOR medians, or the least limit."""
    dog, clock = made
    dog.beat(0)
    for step in range(1, LEAST):
        clock.now += 3.0
        dog.beat(step)
    assert limit(dog) == PATIENCE * 10.0
    clock.now += 3.0
    dog.beat(LEAST)
    assert limit(dog) == FACTOR * 3.0


def test_a_phase_may_take_longer_and_is_not_a_step(made):
    """Inside it the limit is PATIENCE times the least, and its time is no step's."""
    dog, clock = made
    for step in range(LEAST + 1):
        dog.beat(step)
        clock.now += 0.1
    with dog.phase("evaluate"):
        assert limit(dog) == PATIENCE * 10.0
        clock.now += 500.0
    assert limit(dog) == 10.0
    dog.beat(LEAST + 1)
    assert limit(dog) == 10.0  # a median of 0.1 s still, so the least limit


def test_a_batch_may_take_as_long_as_its_store_may(made):
    """The wait counts in its step, and a step of milliseconds does not shorten its limit."""
    dog, clock = made
    for step in range(LEAST + 1):
        dog.beat(step)
        clock.now += 0.1
    assert limit(dog) == 10.0
    with dog.waiting():
        assert limit(dog) > shard_io.TIMEOUT_S + shard_io.RETRY_SECONDS
        clock.now += 700.0
    assert dog._heartbeat.at < clock.now - 700.0
    assert limit(dog) == 10.0
    for seconds in (1.0, 2.0):
        slow = Watchdog(seconds * 1000, clock=clock)
        with slow.waiting():
            assert limit(slow) == PATIENCE * seconds * 1000


@pytest.fixture
def quick(monkeypatch):
    """A watchdog looks every 10 ms."""
    monkeypatch.setattr(fault, "POLL_SECONDS", 0.01)


def polled(board, dogs):
    """Wait until every watchdog has looked twice at what all of them write now."""
    for _ in range(2):
        before = Counter(board.written)
        deadline = time.monotonic() + 5.0
        names = [f"process/{dog._index}" for dog in dogs]
        while not all(board.written[n] > before[n] + 1 for n in names):
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["checkpoint", "profile"])
def test_the_others_wait_for_a_process_in_a_long_phase(quick, phase):
    """A slow save or profile in one process is no silence of those that queued the next step."""
    clock, ended, board = Clock(), [], Board()
    shared = {"count": 2, "clock": clock, "end": ended.append, "board": board}
    dogs = [Watchdog(120.0, index=i, **shared) for i in (0, 1)]
    with dogs[0], dogs[1]:
        for step in range(LEAST + 2):
            for dog in dogs:
                dog.beat(step)
            clock.now += 0.2
        with dogs[0].phase(phase):
            for _ in range(10):
                clock.now += 100.0
                polled(board, dogs)
        polled(board, dogs)
        clock.now += 100.0  # less than the limit after the end of the phase
        polled(board, dogs)
        assert ended == []
        dogs[0].beat(LEAST + 2)
        clock.now += 121.0
        dogs[0]._thread.join(10.0)
        dogs[1]._thread.join(10.0)
    assert ended == [EXIT_CODE, EXIT_CODE]


def steady(dog):
    """As many steps as tell how long one takes."""
    for step in range(LEAST + 1):
        dog.beat(step)


def run(dog):
    """Start it and wait until it ended or a second has passed."""
    with dog:
        dog._thread.join(1.0)
        return not dog._thread.is_alive()


def test_silence_ends_the_process_with_every_stack(caplog):
    """The report names process, step and phase and has this very test's stack."""
    ended, reports = [], []
    dog = Watchdog(0.04, end=ended.append, on_end=reports.append)
    steady(dog)
    dog.beat(7)
    assert run(dog)
    assert ended == [EXIT_CODE]
    assert "process 0 made no progress" in reports[0]
    assert re.search(r"\(allowed: \d+ s; TrainConfig\.watchdog_seconds\)", reports[0])
    assert "after step 7" in reports[0]
    assert "thread MainThread" in reports[0]
    assert "test_silence_ends_the_process" in reports[0]
    assert reports[0] in caplog.text


def test_a_long_phase_that_ends_while_the_others_are_heard_is_no_silence():
    """Its minutes count by its own patience, also when a step's begins in that very moment."""
    clock, ended, heard = Clock(), [], threading.Event()

    class Slow(Board):
        def all(self):
            if phase is not None and not heard.is_set():
                phase.__exit__(None, None, None)
                heard.set()
            return super().all()

    phase = None
    with Watchdog(0.1, clock=clock, end=ended.append, board=Slow()) as dog:
        dog.beat(1)
        opened = dog.phase("evaluate")
        opened.__enter__()
        clock.now += 2.0  # 20 limits of a step, less than the phase's 30
        phase = opened
        assert heard.wait(2.0)
        time.sleep(0.2)
    assert ended == []


def test_all_processes_end_and_the_one_behind_is_named(monkeypatch):
    """The first whose patience ends tells the others, which end though they wait for long yet."""
    monkeypatch.setattr(fault, "POLL_SECONDS", 0.02)
    board, ended, reports = Board(), {}, {}

    def dog(index, seconds, step):
        hears = {
            "end": functools.partial(ended.__setitem__, index),
            "on_end": functools.partial(reports.__setitem__, index),
        }
        made = Watchdog(seconds, index=index, count=3, board=board, **hears)
        steady(made)
        made.beat(step)
        return made

    dogs = [dog(0, 60.0, 9), dog(1, 60.0, 8), dog(2, 0.3, 9)]
    for each in dogs:
        each.__enter__()
    for each in dogs:
        each._thread.join(5.0)
        each.__exit__()
    assert ended == {0: EXIT_CODE, 1: EXIT_CODE, 2: EXIT_CODE}
    assert all("process 2 made no progress" in report for report in reports.values())
    assert "behind the others: process 1\n" in reports[2]
    assert json.loads(board["process/1"])["step"] == 8


@pytest.mark.parametrize("hangs", [False, True])
def test_nothing_about_the_report_keeps_the_process_alive(monkeypatch, hangs):
    """Neither a board or a callback that fails, nor one that hangs as the store may."""

    class Broken(Board):
        def put(self, name, text):
            raise ConnectionError("gone")

    def fail(report):
        if hangs:
            hang.wait(60)
        raise OSError("disk full")

    monkeypatch.setattr(fault, "ON_END_SECONDS", 0.1)
    ended, hang = [], threading.Event()
    made = Watchdog(0.04, board=Broken(), on_end=fail, end=ended.append)
    steady(made)
    assert run(made)
    assert ended == [EXIT_CODE]
    hang.set()


def test_a_timer_that_was_set_late_is_taken_back(monkeypatch):
    """The thread may be about to set it when the run leaves, and nobody else would take it back."""
    calls, setting, left = [], threading.Event(), threading.Event()

    class Timer:
        def dump_traceback_later(self, *_, **__):
            setting.set()
            left.wait(10)
            calls.append("set")

        def cancel_dump_traceback_later(self):
            calls.append("taken back")

    monkeypatch.setattr(fault, "faulthandler", Timer())
    with Watchdog(0.04) as dog:
        assert setting.wait(10)
    left.set()
    dog._thread.join(10)
    assert calls == ["taken back", "set", "taken back"]


def test_sigterm_is_noticed_and_the_old_handler_comes_back():
    """Inside the context SIGTERM only sets the flag; after it the old handler is in place."""
    heard = []
    old = signal.signal(signal.SIGTERM, lambda *_: heard.append("old"))
    try:
        with StopSignal(many_processes=False) as stop:
            assert not stop.requested()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested()
            assert heard == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == ["old"]
    finally:
        signal.signal(signal.SIGTERM, old)


@pytest.mark.slow
def test_a_second_signal_while_the_first_is_heard_changes_nothing():
    """A signal at every line that the handler runs, in whatever module."""
    script = """
import faulthandler, signal, sys
from training.fault import StopSignal
left = [50]
def trace(frame, event, argument):
    if left[0] > 0:
        left[0] -= 1
        signal.raise_signal(signal.SIGTERM)
    return trace
with StopSignal(many_processes=False) as stop:
    faulthandler.dump_traceback_later(20, exit=True)
    sys.settrace(trace)
    signal.raise_signal(signal.SIGTERM)
    sys.settrace(None)
    assert stop.requested()
print(50 - left[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert int(done.stdout or 0) > 1, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True])
def test_once_told_to_leave_the_process_is_not_ended_on_its_way_out(told):
    """Another signal after the context kills a process that heard none in it, and no other."""
    script = f"""
import os, signal
from training.fault import StopSignal
with StopSignal(many_processes=False) as stop:
    if {told}:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested()
os.kill(os.getpid(), signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == (0 if told else -signal.SIGTERM)


def test_outside_the_main_thread_nothing_is_installed():
    """A loop in a thread runs without a handler instead of failing."""
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def body():
        with StopSignal(many_processes=False) as stop:
            seen.append((stop.requested(), signal.getsignal(signal.SIGTERM) is before))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(False, True)]
