"""Ctrl-C once, Ctrl-C twice and a plain kill, at any moment of a real run: fault 42.

Every trial starts the command line as a terminal does, in a session of its own, signals it at a
moment that the trial's number decides, and looks at what is left: on the screen, of the processes,
in the store. Then the same run is done to its end.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.store import lease, storage
from tests.faults.crash import outputs
from tests.faults.interrupt_graph import EXPERIMENT, build
from tests.faults.registry import Fault, pick, trials
from tests.pipeline.cli.terminal import Screen, Terminal
from tests.pipeline.helpers import check_invariants, recorded

START_SECONDS = 90.0  # until the moment has come: starting Ray takes some ten on two cores
STOP_SECONDS = 45.0  # what is in flight here takes a few
END_SECONDS = 3.5  # after the second Ctrl-C: "at once"
# While Ray's core connects, no Python runs: a second if the machine is idle, four if it is not.
STARTING_SECONDS = 10.0
GONE_SECONDS = 5.0  # until the last process of ours is gone
SAVED = {"patient": ({"saved": True}, {})}


@dataclass(frozen=True)
class Case:
    """One kind of trial."""

    phase: str  # of the run: looking, starting (Ray), shards, single, gang, end
    how: str = "once"  # or twice (Ctrl-C), kill (SIGTERM, to the driver alone)
    tty: bool = True  # on a real pty
    hardware: str = ""  # of the gang


# The first trials by number 0, those of every commit, are the cases 6, 9 and 0 (see `pick`).
INLINE = (
    Case("shards", "kill", tty=False),
    Case("single"),
    Case("single", "twice", tty=False),
    Case("looking", tty=False),
    Case("looking", "twice"),
    Case("end"),
    Case("shards", "twice"),
    Case("end", "twice", tty=False),
    Case("shards"),
    Case("gang", hardware="local"),
)
RAY = (
    Case("shards", "twice", tty=False),
    Case("gang", hardware="local"),
    Case("starting"),
    Case("starting", "twice", tty=False),
    Case("starting", "kill"),
    Case("single", tty=False),
    Case("shards"),
    Case("shards", "kill", tty=False),
    Case("end"),
    Case("gang", hardware="cpu-2x1", tty=False),
)


@dataclass
class Trial:
    """One run that is disturbed, its store, and what is measured of it."""

    case: Case
    executor: str
    folder: Path
    draw: random.Random
    measured: dict[str, list[float]]

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.store = str(self.folder / "store")
        (self.folder / "slow.py").write_text(EXPERIMENT)

    def command(self, executor: str) -> list[str]:
        gang = ["--gang", self.case.hardware] if self.case.hardware else []
        script = [sys.executable, str(self.folder / "slow.py")]
        return [*script, "--prefix", self.store, "--executor", executor, *gang]

    def marks(self, run: str = "first") -> list[str]:
        path = self.folder / run
        return path.read_text().splitlines() if path.exists() else []

    def events(self) -> list[dict[str, Any]]:
        files = sorted(Path(self.store, "events").glob("*.jsonl"), key=lambda f: f.stat().st_mtime)
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def disturb(self) -> None:
        environment = {"PONENTE_MARKS": str(self.folder / "first")}
        command = self.command(self.executor)
        with Terminal(command, environment, tty=self.case.tty) as terminal:
            _await(lambda: self._has_come(terminal), START_SECONDS, self.case.phase, terminal)
            time.sleep(self.draw.uniform(0, _WINDOW[self.executor, self.case.phase]))
            status = self._signal(terminal)
            said = " ".join(re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", terminal.text).split())
            left = terminal.left_after(GONE_SECONDS)
            assert not left, f"left behind: {left}; said: {said}"
            if self.case.tty:
                assert terminal.modes_now() == terminal.modes, "the terminal has other modes"
                screen = Screen(terminal.rows, terminal.columns)
                screen.feed(terminal.text)
                assert screen.cursor, "the cursor is hidden"
        for word in ("Traceback", "Exception ignored", "Fatal"):
            assert word not in said, f"a stack trace: {said}"
        self._check(status, said)

    def _has_come(self, terminal: Terminal) -> bool:
        """Whether the run is in the phase in which it is to be disturbed."""
        match self.case.phase:
            case "looking":
                return "preset" in terminal.text
            case "starting":
                return "starting Ray" in terminal.text
            case "end":
                return any(e["event"] == "finished" and e["step"] == "total" for e in self.events())
            case "gang":
                return len(self.marks()) >= (2 if self.case.hardware.startswith("cpu-2") else 1)
            case "single":
                return "begin all" in self.marks()
        return sum(word.startswith("end") for word in self.marks()) >= 1 + self.draw.randrange(2)

    def _signal(self, terminal: Terminal) -> int:
        """Press, and again if so wanted; the exit status, checked to come in time."""
        send = terminal.terminate if self.case.how == "kill" else terminal.interrupt
        send()
        clock, limit, name = time.monotonic(), STOP_SECONDS, "seconds_to_stop"
        if self.case.how == "twice":
            time.sleep(self.draw.uniform(0.02, 1.0))
            if terminal.process.poll() is None:
                clock, limit, name = time.monotonic(), END_SECONDS, "seconds_to_end"
                if self.case.phase == "starting":
                    limit, name = limit + STARTING_SECONDS, "seconds_to_end_starting"
                send()
        try:
            status = terminal.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end in {limit} s; said: {terminal.text}") from None
        self.measured[name].append(round(time.monotonic() - clock, 2))
        return status

    def _check(self, status: int, said: str) -> None:
        """Exit status, message and store after the disturbance."""
        done = "total" in outputs(self.store) if os.path.exists(self.store) else False
        expected = {143} if self.case.how == "kill" else {130}
        assert status in expected | ({0} if done else set()), f"exit {status}; said: {said}"
        assert status == 0 or "run it again to resume" in said, f"no word of it: {said}"
        clean = self.case.how != "twice"
        if clean and self.case.phase in ("shards", "single", "gang"):
            assert "stopping: what is in flight is finished first" in said, said
        if self.case.hardware:
            assert (self.folder / "first.saved").exists(), "the gang was not asked to save"
        if os.path.exists(self.store):
            check_invariants(self.store)
        if clean:
            self._check_clean()

    def _check_clean(self) -> None:
        """What was begun is finished and recorded, and every lease is released."""
        begun = {w.removeprefix("begin ") for w in self.marks() if w.startswith("begin")}
        ended = {w.removeprefix("end ") for w in self.marks() if w.startswith("end")}
        assert begun == ended, f"begun and given up: {begun - ended}"
        names = {shard.name.removeprefix("part/") for shard in _recorded(self.store)}
        assert ended <= names, f"finished and not recorded: {ended - names}"
        leases = {str(p) for p in Path(self.store).glob("*/leases/*")}
        held = [p for p in leases if p.endswith(".json") and p[:-5] + ".done" not in leases]
        assert not held, f"leases not released: {held}"

    def finish(self, reference: dict[str, Any]) -> None:
        """The same run again, to its end; then delete the store."""
        before = {shard.name.removeprefix("part/") for shard in _recorded(self.store)}
        # So that nobody waits for whoever is gone, here or on the way into the next step.
        for node in topological([as_node(build(self.case.hardware))]):
            assert lease.holder(storage.join(self.store, node.directory)) is None
        told = len(self.events()) if os.path.exists(self.store) else 0
        marks = self.folder / ("first" if self.case.hardware else "second")
        environment = {"PONENTE_MARKS": str(marks)}
        if self.case.hardware:
            # Keys do not depend on where it runs; this executor has one place alone.
            self.case = Case("gang", hardware="local")
        with Terminal(self.command("inline"), environment, tty=False) as terminal:
            assert terminal.wait(60) == 0, terminal.text
        waited = [e for e in self.events()[told:] if e["event"] == "waiting"]
        assert not waited, f"waited: {waited}"
        again = {w.removeprefix("begin ") for w in self.marks("second")} & before
        assert not again, f"written again: {again}"
        assert outputs(self.store) == reference, "the outputs differ from an undisturbed run's"
        check_invariants(self.store, finished=True)
        shutil.rmtree(self.folder)


# Seconds after its beginning within which a phase is disturbed.
_WINDOW = defaultdict(
    lambda: 0.3,
    {
        ("inline", "looking"): 0.05,
        ("inline", "single"): 0.8,
        ("inline", "shards"): 2.0,
        ("inline", "end"): 0.15,
        ("ray", "starting"): 8.0,
        ("ray", "shards"): 1.5,
        ("ray", "end"): 2.0,
    },
)


def _recorded(store: str) -> list[Any]:
    return list(recorded(store).values()) if os.path.exists(store) else []


def _await(condition: Callable[[], bool], seconds: float, what: str, terminal: Terminal) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} has not come: {terminal.text}"
        assert terminal.process.poll() is None, f"ended before {what}: {terminal.text}"
        time.sleep(0.01)


def _undisturbed(workspace: Path) -> dict[str, Any]:
    trial = Trial(Case("shards"), "inline", workspace / "undisturbed", random.Random(), {})
    environment = {"PONENTE_MARKS": str(trial.folder / "first")}
    command = [*trial.command("inline"), "--seconds", "0"]
    with Terminal(command, environment, tty=False) as terminal:
        assert terminal.wait(60) == 0, terminal.text
    return outputs(trial.store)


def _suite(executor: str, cases: tuple[Case, ...]) -> Callable[[int, int, Path], dict[str, Any]]:
    def run(seed: int, count: int, workspace: Path) -> dict[str, Any]:
        reference = _undisturbed(workspace)
        assert set(reference) == {"slow_numbers", "doubled", "total"}
        measured: dict[str, list[float]] = defaultdict(list)

        def trial(number: int) -> None:
            case = cases[pick(number, len(cases))]
            folder = workspace / f"trial-{number}"
            disturbed = Trial(case, executor, folder, random.Random(number), measured)
            try:
                disturbed.disturb()
                disturbed.finish(SAVED if case.hardware else reference)
            except AssertionError as error:
                raise AssertionError(f"{executor}, {case}: {error}") from error

        made = trials(seed, count, trial)
        longest = {f"{name}_max": max(seconds) for name, seconds in measured.items()}
        return {"trials": made, "executor": executor, **longest}

    return run


FAULTS = {
    42: [
        Fault("Ctrl-C once, twice, and kill, in this process", 2, 20, _suite("inline", INLINE)),
        Fault("Ctrl-C once, twice, and kill, on Ray", 1, 20, _suite("ray", RAY)),
    ]
}
