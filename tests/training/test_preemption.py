"""SIGTERM becomes a question the loop asks between steps."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from training.preemption import StopSignal


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


@pytest.mark.parametrize("told", [False, True])
def test_once_told_to_leave_the_process_is_not_ended_on_its_way_out(told):
    """Another signal after the context kills a process that heard none in it, and no other."""
    script = f"""
import os, signal
from training.preemption import StopSignal
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
