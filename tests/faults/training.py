"""Trainers that are killed, preempted and stuck: faults 5, 7, 8, 10 and 53.

The final parameters, moments, losses and evaluations of a disturbed run are those of an undisturbed
one, bit for bit; what a signal or a stuck process costs is bounded.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

from tests.faults.registry import Fault, trials
from tests.faults.trainers import SPLIT, Trainers, finish
from tests.training import tiny
from training.fault import EXIT_CODE

STEPS = 40
RUN = ("--steps", str(STEPS), "--every", "4", "--pause", "0.02")
LONG = ("--steps", "100000", "--every", "100000")
GRACE_SECONDS = 10.0
WATCHDOG_SECONDS = 8.0
SLOW_SECONDS = 8.0


def _folder(workspace: Path) -> Path:
    folder = workspace / "data"
    if not folder.exists():
        tiny.write_data(str(folder))
    return folder


def _same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name in ("rows", "evaluations", "parameters", "steps"):
        assert got[name] == want[name], f"{name} differ from the undisturbed run's"


def killed(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """SIGKILL at a random moment of a run, in which a checkpoint may just be written; rerun."""
    folder = _folder(workspace)
    want = finish(folder, workspace / "whole", *RUN)
    compilations = []

    def trial(number: int) -> None:
        draw = random.Random(number)
        run = workspace / f"trial-{number}"
        with Trainers(folder, run, *RUN) as trainers:
            trainers.wait_for_step(draw.randrange(1, STEPS))
            time.sleep(draw.random() * 0.15)
            trainers.kill()
        got = finish(folder, run, *RUN)
        _same(got, want)
        compilations.append(got["compilations"])

    done = trials(seed, count, trial)
    assert set(compilations) <= {0, 1}
    return {"trials": done, "bit_equal": done}


def preempted(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """SIGTERM to one of two processes: both stop at one step, save and exit 0 within seconds."""
    folder, seconds = _folder(workspace), []

    def trial(number: int) -> None:
        draw = random.Random(number)
        run = workspace / f"trial-{number}"
        gang: dict[str, Any] = {"processes": 2, "devices": 2}
        with Trainers(folder, run, *LONG, *SPLIT, **gang) as trainers:
            trainers.wait_for_step(draw.randrange(2, 30))
            time.sleep(draw.random() * 0.1)
            began = time.monotonic()
            trainers.kill(number % 2, signal.SIGTERM)
            assert trainers.ends() == [0, 0], trainers.tail()
            seconds.append(time.monotonic() - began)
            first, second = trainers.report(0), trainers.report(1)
        assert first["preempted"]
        assert second["preempted"]
        assert first["steps"] == second["steps"], "the processes stopped at different steps"
        assert len(list((run / "records").glob("*.json"))) == 1, "no checkpoint was recorded"
        assert seconds[-1] < GRACE_SECONDS, f"took {seconds[-1]:.1f} s of the 30 s there are"

    return {"trials": trials(seed, count, trial), "slowest_seconds": round(max(seconds), 1)}


def terminated_twice(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """SIGTERM twice, or SIGKILL soon after SIGTERM while the checkpoint is written; rerun."""
    folder = _folder(workspace)
    want = finish(folder, workspace / "whole", *RUN)
    ways = {"twice": 0, "killed": 0}

    def trial(number: int) -> None:
        draw = random.Random(number)
        run = workspace / f"trial-{number}"
        with Trainers(folder, run, *RUN) as trainers:
            trainers.wait_for_step(draw.randrange(1, STEPS - 4))
            trainers.kill(0, signal.SIGTERM)
            time.sleep(draw.random() * 0.2)
            if number % 2:
                trainers.kill(0, signal.SIGTERM)
                assert trainers.ends() == [0], trainers.tail()
                report = trainers.report()
                finished = report["steps"] == STEPS  # it was at its last step
                assert report["preempted"] or finished, "neither preempted nor finished"
                ways["twice"] += 1
            else:
                trainers.kill()
                ways["killed"] += 1
        _same(finish(folder, run, *RUN), want)

    return {"trials": trials(seed, count, trial), **ways}


def stuck(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """A process that lives and does nothing: all are ended, the log names it and has stacks."""
    folder, seconds = _folder(workspace), []

    def trial(number: int) -> None:
        run, lazy = workspace / f"trial-{number}", number % 2
        arguments = (*LONG, *SPLIT, "--watchdog", str(WATCHDOG_SECONDS))
        more = {lazy: ("--stuck-at", str(10 + number % 20))}
        gang: dict[str, Any] = {"processes": 2, "devices": 1, "more": more}
        with Trainers(folder, run, *arguments, **gang) as trainers:
            trainers.wait_for(lambda line: line.startswith("stuck"))
            began = time.monotonic()
            statuses = trainers.ends(WATCHDOG_SECONDS + 60)
            seconds.append(time.monotonic() - began)
            log = trainers.log()
        assert EXIT_CODE in statuses, f"exit {statuses}\n{log[-3000:]}"
        assert 0 not in statuses
        assert f"behind the others: process {lazy}\n" in log, log[-3000:]
        assert log.count("thread MainThread:") == 2, "stacks of both processes are in the log"
        assert "time.sleep(3600)" in log, "the stack of the process that is stuck"
        late = seconds[-1] - WATCHDOG_SECONDS
        assert late < 15.0, f"ended {late:.1f} s after the deadline"

    done = trials(seed, count, trial)
    return {"trials": done, "slowest_after_deadline": round(max(seconds) - WATCHDOG_SECONDS, 1)}


def slow(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """One of two processes is slow to save, evaluate and profile: the watchdog ends neither."""
    folder, lived = _folder(workspace), []

    def trial(number: int) -> None:
        run, lazy = workspace / f"trial-{number}", number % 2
        arguments = ("--steps", "36", "--every", "16", "--profile", *SPLIT)
        more = {lazy: ("--slow", str(SLOW_SECONDS))}
        gang: dict[str, Any] = {"processes": 2, "devices": 1, "more": more}
        watched = ("--watchdog", str(SLOW_SECONDS / 4), "--pause", "0.02")
        with Trainers(folder, run, *arguments, *watched, **gang) as trainers:
            statuses, log = trainers.ends(300), trainers.log()
            phases = {line for line in list(trainers.lines.queue) if line.startswith("slow ")}
            assert statuses == [0, 0], f"exit {statuses}\n{log[-3000:]}"
            assert trainers.report(0)["steps"] == 36
        assert "watchdog:" not in log
        assert {"slow HostCopies", "slow Evaluator"} <= phases
        assert ("slow Profiler" in phases) == (lazy == 0), "process 0 alone takes profiles"
        lived.append(number)

    return {"trials": trials(seed, count, trial), "lived": len(lived)}


FAULTS = {
    5: [Fault("SIGKILL of the trainer at any moment", 1, 20, killed)],
    7: [Fault("SIGTERM to one of two trainer processes", 1, 20, preempted)],
    8: [Fault("SIGTERM twice, or SIGKILL while saving", 1, 10, terminated_twice)],
    10: [Fault("one trainer process lives and does nothing", 1, 5, stuck)],
    53: [Fault("one trainer process is slow in long phases", 1, 4, slow)],
}
