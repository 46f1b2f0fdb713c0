"""Seconds from the start of a gang to its first step, resumed with and without kept programs.

    python -m tests.bench.restart [--repeats 3] [--processes 1 2]

A tiny run is killed after it took checkpoints. Then it is resumed from the same checkpoint again
and again, compiling its programs and loading those that the first attempt kept in turn, with XLA's
own options: in one process, and in two processes of one device each that split the state. Prints a
JSON line for each restart (`seconds`: from the start of the processes to the first step's line, on
this process's clock; `parts`: as the rows of process 0 have them), and the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib

from tests.faults.trainers import SPLIT, Trainers
from tests.training import tiny
from training.metrics.goodput import read_attempts

STEPS = 8
# Not the suite's options, with which compiling is cheap, nor its cache; and every program is kept.
XLA_OPTIONS = {
    "XLA_FLAGS": "",
    "JAX_COMPILATION_CACHE_DIR": "",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
WARMTH = {False: "compiled", True: "kept"}


def say(measurement: str, **figures: Any) -> None:
    """One JSON line, with versions and how busy the machine was."""
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    load = {"load": round(os.getloadavg()[0], 1), "cpus": os.cpu_count()}
    print(json.dumps({"measurement": measurement, **figures, **versions, **load}), flush=True)


def arguments(processes: int, pause: float) -> tuple[str, ...]:
    cadence = ("--steps", str(STEPS), "--every", "2", "--pause", str(pause))
    return (*cadence, *(SPLIT if processes == 2 else ()))


def interrupted(folder: Path, run: Path, processes: int) -> None:
    """The run that is resumed: killed after step 4, so that it has a checkpoint."""
    gang = {"processes": processes, "environment": XLA_OPTIONS}
    with Trainers(folder, run, *arguments(processes, 1.0), **gang) as trainers:
        while not list((run / "records").glob("00000004.*")):
            trainers.wait_for_step(1)
        for index in range(processes):
            trainers.kill(index)


def restart(
    folder: Path, base: Path, run: Path, processes: int, *, kept: bool
) -> tuple[float, Mapping[str, float]]:
    """Resume `base` as `run`: seconds to the first step, and its parts."""
    (run / "records").mkdir(parents=True)
    for record in (base / "records").glob("0000000[24].*.json"):
        shutil.copy(record, run / "records")
    if kept:
        shutil.copytree(base / "shared", run / "shared")
    began = time.monotonic()
    gang = {"processes": processes, "environment": XLA_OPTIONS}
    with Trainers(folder, run, *arguments(processes, 0.0), **gang) as trainers:
        trainers.wait_for(lambda line: line.startswith("step "))
        seconds = time.monotonic() - began
        assert set(trainers.ends()) == {0}, trainers.tail()
        compilations = [trainers.report(index)["compilations"] for index in range(processes)]
    assert compilations[0] == int(not kept), compilations
    (found,) = read_attempts(str(path) for path in (run / "attempts").iterdir())
    assert (found.first_step, found.loaded) == (4, kept), found
    return seconds, found.startup


def measure(folder: Path, base: Path, processes: int, repeats: int) -> None:
    interrupted(folder, base / "interrupted", processes)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    parts: dict[bool, list[Mapping[str, float]]] = {False: [], True: []}
    for repeat in range(repeats):
        for kept in (False, True):
            run = base / f"{WARMTH[kept]}-{repeat}"
            took, found = restart(folder, base / "interrupted", run, processes, kept=kept)
            seconds[kept].append(took)
            parts[kept].append(found)
            say("restart", processes=processes, program=WARMTH[kept], **_figures(took, found))
    for kept, taken in seconds.items():
        names = parts[kept][0]
        medians = {name: statistics.median(each[name] for each in parts[kept]) for name in names}
        figures = _figures(statistics.median(taken), medians)
        say("median restart", processes=processes, program=WARMTH[kept], **figures)


def _figures(seconds: float, parts: Mapping[str, float]) -> dict[str, Any]:
    rounded = {name: round(value, 2) for name, value in parts.items()}
    return {"seconds": round(seconds, 2), "parts": rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], choices=(1, 2))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ponente-restart-") as base:
        folder = Path(base, "data")
        tiny.write_data(str(folder))
        for processes in asked.processes:
            measure(folder, Path(base, str(processes)), processes, asked.repeats)


if __name__ == "__main__":
    main()
