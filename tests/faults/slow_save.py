"""A run that is stopped while its store is slow: the save is waited for and used: fault 42.

The store answers each request for a saved file late, so that a save takes many times as long as
anything waits that does not wait for saves. A second Ctrl-C ends it at once.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import slow_save_graph as graph
from tests.faults.fake_gcs import FakeGCS, Faults
from tests.faults.registry import Fault, pick, trials
from tests.pipeline.cli.terminal import Terminal

STORE = "gs://bucket/runs"
LATE_SECONDS = 2.5  # an answer; anything shorter could pass by luck
HOWS = ("ctrl-c", "stop", "twice")
START_SECONDS, SAVE_SECONDS, END_SECONDS = 90.0, 240.0, 5.0


def _command(verb: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "pipeline.cli", verb, graph.__file__, "--prefix", STORE, *flags]


def _await(word: str, terminal: Terminal) -> None:
    limit = time.monotonic() + START_SECONDS
    while word not in graph.marks():
        assert time.monotonic() < limit, f"no {word}: {terminal.text}"
        assert terminal.process.poll() is None, f"ended before {word}: {terminal.text}"
        time.sleep(0.05)


def _stop(how: str, terminal: Terminal) -> None:
    if how == "stop":
        done = subprocess.run(
            _command("stop"), capture_output=True, text=True, timeout=START_SECONDS, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        terminal.interrupt()
    _await("saves", terminal)


def _disturbed(how: str, flags: list[str], server: FakeGCS) -> str:
    """Stop a run while the store is slow; returns what it said."""
    with Terminal(_command("run", *flags), tty=False) as terminal:
        _await("waits", terminal)
        server.faults = Faults(latency_seconds=LATE_SECONDS, late="weights-")
        _stop(how, terminal)
        limit = SAVE_SECONDS
        if how == "twice":
            time.sleep(1.0)
            terminal.interrupt()
            limit = END_SECONDS
        try:
            status = terminal.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end in {limit} s: {terminal.text}") from None
        assert status == 130, f"exit {status}: {terminal.text}"
        left = terminal.left_after(END_SECONDS)
        assert not left, f"left behind: {left}; said: {terminal.text}"
        return terminal.text


def _suite(executor: str, files: int) -> Callable[[int, int, Path], dict[str, Any]]:
    def trial(number: int, workspace: Path) -> None:
        how = HOWS[pick(number, len(HOWS))]
        hardware = random.Random(number).choice(["local", "cpu-2x1"]) if executor == "ray" else ""
        flags = ["--executor", executor, "--files", str(files)]
        flags += ["--hardware", hardware] if hardware else []
        os.environ["PONENTE_MARKS"] = str(workspace / f"marks-{number}")
        with FakeGCS() as server:
            said = _disturbed(how, flags, server)
            server.faults = Faults()
            if how == "twice":
                return
            assert "saved" in graph.marks(), f"{how}: the save was cut short: {said}"
            assert "stopped: saved after step 3" in said, f"{how}: {said}"
            waited = files * LATE_SECONDS > 40.0
            assert not waited or "stopping for 30.0 s: waiting for saver" in said, f"{how}: {said}"
            before = len(graph.marks())
            again = _command("run", "--executor", "inline")
            done = subprocess.run(again, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            assert len(graph.marks()) == before, f"{how}: what was saved was not used"

    def run(seed: int, count: int, workspace: Path) -> dict[str, Any]:
        made = trials(seed, count, lambda number: trial(number, workspace))
        return {"trials": made, "executor": executor, "files": files}

    return run


FAULTS = {
    42: [
        Fault("stop while a save is slow, in this process", 1, 6, _suite("inline", 1)),
        Fault("stop while a save is slow, on Ray", 1, 6, _suite("ray", 1)),
        Fault("stop while a save takes a minute, in this process", 0, 3, _suite("inline", 20)),
        Fault("stop while a save takes a minute, on Ray", 0, 3, _suite("ray", 20)),
    ]
}
