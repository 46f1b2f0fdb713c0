"""SIGTERM becomes a question the loop asks between steps."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from training.fault import StopSignal


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
