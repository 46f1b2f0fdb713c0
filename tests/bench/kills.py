"""Finishing times of tiny trainings under exponential kills, beside what the plan simulates.

    python -m tests.bench.kills [--runs 10] [--means 60 25 12]

Each run is a CPU process that trains the tiny model and is killed with SIGKILL after a time drawn
from an exponential distribution, then started again after a wait drawn from another one, until its
last checkpoint has a record. A server that has imported the trainer forks the processes, and each
run finds the compiled programs of the first: else starts would take longer than the training.

The first time of the runs of one mean is drawn once from each of as many equal parts of the
distribution, which leaves it exponential and makes means less noisy; the means take turns. A run is
predicted by `training.cost.preemption` with the times of every other run, as the plan reads them
from a store, and the trials of all of these together: on a busy machine each has its own speed. One
JSON line for each run, for each mean, and for all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from steps.training.plan import timings
from tests.compilation import xla_flags
from tests.training import tiny
from training.cost.preemption import Preemptions, Work, simulate
from training.metrics.goodput import AttemptTime, read_attempts

STEPS, EVERY, PAUSE, WAIT = 80, 8, 0.06, 1.0  # seconds after a step, and mean ones of a wait


def killed(folder: Path, run: Path, mean: float, first: float, rng: np.random.Generator) -> float:
    """Train under kills; seconds until the last checkpoint had its record."""
    context = multiprocessing.get_context("forkserver")
    began, until = time.time(), first
    while True:
        process = context.Process(target=trains, args=(str(folder), str(run), time.time()))
        process.start()
        process.join(until)
        assert process.exitcode in (None, 0), (run / "log.txt").read_text()[-3000:]
        process.kill()
        process.join()
        if ended := list((run / "records").glob(f"{STEPS:08d}.*.json")):
            return ended[0].stat().st_mtime - began
        time.sleep(rng.exponential(WAIT))
        until = rng.exponential(mean)


def trains(folder: str, run: str, began: float) -> None:
    """The process; the system's time of its start would be off by up to a second."""
    Path(run).mkdir(parents=True, exist_ok=True)
    log = os.open(f"{run}/log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    cadence = ["--steps", str(STEPS), "--every", str(EVERY), "--pause", str(PAUSE)]
    sys.argv = ["trainer", folder, "--run", run, *cadence]
    from tests.faults import trainer

    trainer.process_started = lambda: began
    trainer.main()


def attempts_of(run: Path) -> list[AttemptTime]:
    """By the rows of their metrics logs."""
    return read_attempts(str(path) for path in (run / "attempts").iterdir())


def predicted(others: list[list[AttemptTime]], mean: float) -> np.ndarray:
    """Simulated seconds [trial] with the times of other runs, 1,000 trials of each."""
    every = timings.fields([each for attempts in others for each in attempts])
    every.setdefault("restart", every["start"])
    preemptions, trials = Preemptions(seconds=(mean,), wait=WAIT), []
    for seed, own in enumerate(others):
        work = Work(steps=STEPS, **{**every, **timings.fields(own)})
        trials.append(simulate(work, preemptions, [EVERY], 1000, seed).total[0])
    return np.concatenate(trials)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--means", type=float, nargs="+", default=[60.0, 25.0, 12.0])
    asked = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(1)}
    multiprocessing.set_forkserver_preload(["tests.training.tiny", "training.trainer.trainer"])
    rng, runs = np.random.default_rng(0), list[tuple[float, float, list[AttemptTime]]]()
    with tempfile.TemporaryDirectory(prefix="ponente-kills-") as base:
        folder = Path(base, "data")
        tiny.write_data(str(folder))
        killed(folder, Path(base, "first"), 1e6, 1e6, rng)
        firsts = {}
        for mean in asked.means:
            parts = rng.permutation(asked.runs) + rng.random(asked.runs)
            firsts[mean] = -mean * np.log1p(-parts / asked.runs)
        for index, mean in itertools.product(range(asked.runs), asked.means):
            run = Path(base, f"{mean:g}-{index}")
            shutil.copytree(Path(base, "first", "shared"), run / "shared")
            seconds = killed(folder, run, mean, firsts[mean][index], rng)
            runs.append((mean, seconds, attempts_of(run)))
            times = timings.fields(runs[-1][2])
            say("real", {"mean_between": mean, "seconds": seconds, "times": times})
    rows: list[dict[str, Any]] = []
    for mean, seconds, own in runs:
        trials = predicted([each for _, _, each in runs if each is not own], mean)
        low, high = np.quantile(trials, (0.1, 0.9))
        row = {"mean_between": mean, "attempts": len(own), "seconds": seconds, "low": low}
        row |= {"predicted": trials.mean(), "high": high, "inside": bool(low <= seconds <= high)}
        rows.append(row)
        say("run", row)
    for mean in asked.means:
        say("mean", summary([row for row in rows if row["mean_between"] == mean]))
    say("all", {**summary(rows), "times": timings.fields([a for _, _, each in runs for a in each])})


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares and means of some runs; `standard_error` is that of the real mean, as `error`."""
    real, expected = (np.array([row[name] for row in rows]) for name in ("seconds", "predicted"))
    return {
        "mean_between": [*{row["mean_between"] for row in rows}],
        "runs": len(rows),
        "inside": float(np.mean([row["inside"] for row in rows])),
        "seconds": real.mean(),
        "predicted": expected.mean(),
        "error": expected.mean() / real.mean() - 1,
        "standard_error": (real - expected).std(ddof=1) / len(rows) ** 0.5 / real.mean(),
    }


def say(measurement: str, figures: dict[str, Any]) -> None:
    """One JSON line, with how busy the machine was."""
    load = {"load": round(os.getloadavg()[0], 1), "cpus": os.cpu_count()}
    rounded = {n: round(float(v), 3) if isinstance(v, float) else v for n, v in figures.items()}
    print(json.dumps({"measurement": measurement, **rounded, **load}), flush=True)


if __name__ == "__main__":
    main()
