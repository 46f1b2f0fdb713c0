"""Kills on an imitated slice of four hosts: seconds to notice, to start again, to the next step.

    python -m tests.bench.pod_kills
    python -m tests.bench.pod_kills --faults process,frozen --steps 60

Each trial is `ponente launch experiments/run_200m.py --smoke --on local --hardware v6e-16`, as far
as its training, on a copy of one store with the data. At a step past `--at` something happens to
it; it finishes by itself. One JSON line a trial: seconds after the fault until the driver's log has
a retry (`noticed_s`), a new attempt (`started_s`) and a step (`step_s`), the steps done again, and
whether the output's content digest is that of the trial without a fault.

    process      SIGKILL of one process of the gang
    coordinator  SIGKILL of process 0
    raylet       SIGKILL of a host's raylet, with all that runs on it
    frozen       SIGSTOP of one process
    terminated   SIGTERM to all processes, as a preemption sends it
    resumed      the driver is ended twice; the run resumes on two hosts, then on one process

Of `resumed` the last loss is compared instead: other devices sum in another order.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
FILE = "experiments/run_200m.py"
FAULTS = ("none", "process", "coordinator", "raylet", "frozen", "terminated", "resumed")
RETRIES = ("retried", "waiting_for_resources")
_WAIT_SECONDS = 900.0
_POLL_SECONDS = 0.1


class Trial:
    """One run on its own store."""

    def __init__(self, store: Path, steps: int) -> None:
        self.store, self._steps = store, steps
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, hardware: str) -> None:
        """Launch training; on "local" without the hosts."""
        verb = ["run"] if hardware == "local" else ["launch", "--on", "local"]
        settings = {"steps": self._steps, "batch-size": 16, "checkpoint-every": 5}
        settings |= {"evaluate-every": 10_000, "log-every": 1}
        flags = [w for name, value in settings.items() for w in (f"--training.{name}", str(value))]
        command = [sys.executable, "-m", "steps.cli", *verb, FILE, "--smoke", "--until", "train"]
        command += ["--hardware", hardware, "--prefix", str(self.store), *flags]
        with (self.store / "screen.txt").open("ab") as screen:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PONENTE_NO_COMPILE": "1"},
                stdout=screen,
                stderr=screen,
                start_new_session=True,
            )

    def events(self) -> Iterator[dict[str, Any]]:
        found = []
        for path in (self.store / "events").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                if line.endswith("}"):
                    found.append(json.loads(line))
        yield from sorted(found, key=lambda event: event["time"])

    def first(self, after: float, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first such event of the step that trains; waits for it."""
        end = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < end:
            for event in self.events():
                if event["time"] > after and event.get("step") == "train" and wanted(event):
                    return event
            assert self._process is not None
            if self._process.poll() is not None:
                break
            time.sleep(_POLL_SECONDS)
        raise AssertionError(f"{self.store}: no such event; see screen.txt")

    def step_after(self, after: float, step: int) -> dict[str, Any]:
        """The first progress that has done so many steps."""
        return self.first(
            after,
            lambda e: e["event"] == "progress" and e["unit"] == "steps" and e["done"] >= step,
        )

    def processes(self, word: str) -> dict[int, psutil.Process]:
        """Processes of the hosts by worker id, those whose command line has a word."""
        assert self._process is not None
        found = {}
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if word in " ".join(process.cmdline()) and (host := _host(process)) is not None:
                    found[host] = process
        return found

    def end(self) -> int:
        assert self._process is not None
        return self._process.wait(_WAIT_SECONDS)

    def stop(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGINT)
        self.end()

    def manifest(self) -> dict[str, Any]:
        (path,) = self.store.glob("train-*/manifest.json")
        return json.loads(path.read_text())


def _host(process: psutil.Process) -> int | None:
    """The worker id of the host; Ray's title of a worker covers the worker's own environment."""
    for each in (process, *process.parents()):
        environment = each.environ()
        if "TPU_WORKER_ID" in environment:
            return int(environment["TPU_WORKER_ID"])
    return None


def main() -> None:
    """Build the data once, then every trial on a copy of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--at", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="keep the stores here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pod_kills-") as scratch:
        folder = options.folder or Path(scratch)
        data = folder / "data"
        command = [sys.executable, "-m", "steps.cli", "run", FILE, "--smoke"]
        command += ["--until", "block_shuffle", "--prefix", str(data)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        whole: dict[str, Any] = {}
        for fault in ("none", *(f for f in options.faults.split(",") if f != "none")):
            store = folder / fault
            shutil.copytree(data, store)
            shutil.rmtree(store / "events")
            trial = Trial(store, options.steps)
            line = (
                resumed(trial, options.at) if fault == "resumed" else one(trial, fault, options.at)
            )
            manifest = trial.manifest()
            whole = whole or manifest
            line["same_content"] = manifest["content"] == whole["content"]
            losses = [m["result"]["last"]["loss"] for m in (manifest, whole)]
            line["loss_difference"] = losses[0] - losses[1]
            print(json.dumps({"measure": "pod_kills", "fault": fault, **line}), flush=True)


def one(trial: Trial, fault: str, at: int) -> dict[str, Any]:
    """A trial with one fault: what it cost."""
    begun = time.time()
    trial.start("v6e-16")
    first = trial.step_after(begun, 1)
    line: dict[str, Any] = {"first_step_s": round(first["time"] - begun, 1)}
    if fault != "none":
        before = trial.step_after(begun, at)
        happened = time.time()
        harm(trial, fault)
        retry = trial.first(happened, lambda e: e["event"] in RETRIES)
        started = trial.first(retry["time"], lambda e: e["event"] == "started")
        step = trial.step_after(started["time"], 1)
        line |= {
            "noticed_s": round(retry["time"] - happened, 1),
            "started_s": round(started["time"] - happened, 1),
            "step_s": round(step["time"] - happened, 1),
            "steps_again": before["done"] - step["done"] + 1,
            "cause": str(retry["cause"])[:120],
        }
    line["status"] = trial.end()
    line["seconds"] = round(time.time() - begun, 1)
    return line


def harm(trial: Trial, fault: str) -> None:
    """Do it."""
    gang = trial.processes("ray::_GangProcess")
    if fault == "process":
        gang[2].kill()
    elif fault == "coordinator":
        gang[0].kill()
    elif fault == "frozen":
        gang[2].suspend()
    elif fault == "raylet":
        trial.processes("raylet/raylet")[2].kill()
    else:
        for process in gang.values():
            process.terminate()


def resumed(trial: Trial, at: int) -> dict[str, Any]:
    """Ended by its driver twice: on four hosts, on two, and on one process to the end."""
    line: dict[str, Any] = {}
    for hardware, until in (("v6e-16", at), ("v4-16", 2 * at), ("local", 0)):
        begun = time.time()
        trial.start(hardware)
        step = trial.step_after(begun, 1)
        line[hardware] = {"from_step": step["done"], "step_s": round(step["time"] - begun, 1)}
        if until:
            trial.step_after(begun, until)
            trial.stop()
    line["status"] = trial.end()
    return line


if __name__ == "__main__":
    main()
