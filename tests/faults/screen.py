"""Stdout, stderr or the terminal goes away under a run: fault 50.

Every trial starts the command line in a session of its own, takes its output away at a moment that
the trial's number decides, and expects what an undisturbed run leaves: exit status 0, every output.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.crash import outputs
from tests.faults.interrupt_graph import EXPERIMENT
from tests.faults.registry import Fault, pick, trials
from tests.pipeline.cli.terminal import Terminal
from tests.pipeline.helpers import check_invariants

SECONDS = 120.0
# Last moments of the phases in which the output is taken away, in seconds after the start.
_MOMENTS = {"inline": (0.5, 2.0, 3.5, 5.0), "ray": (1.0, 10.0, 20.0)}


@dataclass(frozen=True)
class Case:
    """How the output ends."""

    # pipe (its reader ends), lines (the reader ends after a few lines), hangup (of a terminal),
    # full (stdout and stderr are /dev/full)
    how: str
    executor: str


def _run(case: Case, folder: Path, draw: random.Random) -> int:
    folder.mkdir(parents=True)
    (folder / "slow.py").write_text(EXPERIMENT)
    store, marks = str(folder / "store"), {"PONENTE_MARKS": str(folder / "marks")}
    command = [sys.executable, str(folder / "slow.py"), "--prefix", store, "--seconds", "0.1"]
    command += ["--executor", case.executor]
    if case.how == "full":
        with open("/dev/full", "w") as full:
            environment = os.environ | marks | {"PYTHONPATH": str(Path(__file__).parents[2])}
            return subprocess.run(
                command, stdout=full, stderr=full, env=environment, timeout=SECONDS, check=False
            ).returncode
    with Terminal(command, marks, tty=case.how == "hangup") as terminal:
        if case.how == "lines":
            wanted, limit = draw.randrange(1, 8), time.monotonic() + SECONDS
            while terminal.text.count("\n") < wanted and terminal.process.poll() is None:
                assert time.monotonic() < limit, terminal.text
                time.sleep(0.01)
        else:
            time.sleep(draw.uniform(0.2, draw.choice(_MOMENTS[case.executor])))
        terminal.hang_up()
        return terminal.wait(SECONDS)


def _suite(executor: str) -> Callable[[int, int, Path], dict[str, Any]]:
    cases = [Case(how, executor) for how in ("lines", "hangup", "pipe", "full")]

    def run(seed: int, count: int, workspace: Path) -> dict[str, Any]:
        def trial(number: int) -> None:
            case, folder = cases[pick(number, len(cases))], workspace / f"trial-{number}"
            status = _run(case, folder, random.Random(number))
            store = str(folder / "store")
            assert status == 0, f"{case}: exit {status}"
            assert set(outputs(store)) == {"slow_numbers", "doubled", "total"}, case
            check_invariants(store, finished=True)

        return {"trials": trials(seed, count, trial), "executor": executor}

    return run


FAULTS = {
    50: [
        Fault("output closed or hung up, in this process", 4, 20, _suite("inline")),
        Fault("output closed or hung up, on Ray", 1, 20, _suite("ray")),
    ]
}
