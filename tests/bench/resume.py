"""Interrupted runs beside uninterrupted ones, with real processes: bits, losses, parameters.

    python -m tests.bench.resume [--kills 20] [--steps 120]

1. A run that is killed (SIGKILL at a random moment, again and again until it had `--kills`) and
   goes on each time from its newest checkpoint, against one that nobody disturbed: equal bits?
2. A run that stops half-way on one device and goes on with 1, 2, 4, 8 devices in one process and
   with 8 devices in 1, 2, 4 processes: largest differences of loss and parameters.

Prints a JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from tests.faults.trainers import Trainers, finish
from tests.training import tiny
from training.checkpoint.restore import restore

GANGS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (4, 2))  # processes, devices of each


def say(measurement: str, **figures: Any) -> None:
    """One JSON line, with versions."""
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    print(json.dumps({"measurement": measurement, **figures, **versions}), flush=True)


def killed(folder: Path, base: Path, steps: int, kills: int, seed: int) -> None:
    """The first measurement."""
    arguments = ("--steps", str(steps), "--every", "3", "--keep", "2", "--pause", "0.05")
    began = time.monotonic()
    want = finish(folder, base / "whole", *arguments)
    undisturbed = time.monotonic() - began
    draw, run = random.Random(seed), base / "killed"
    # Moments in the order of the run, so that each kill finds it further on or at the same place.
    at = sorted(draw.randrange(1, steps - 1) for _ in range(kills))
    began = time.monotonic()
    for step in at:
        with Trainers(folder, run, *arguments) as trainers:
            trainers.wait_for_step(step)
            time.sleep(draw.random() * 0.1)
            trainers.kill()
    got = finish(folder, run, *arguments)
    say(
        "killed",
        kills=kills,
        steps=steps,
        losses_equal=got["rows"] == want["rows"],
        evaluations_equal=got["evaluations"] == want["evaluations"],
        parameters_and_moments_bit_equal=got["parameters"] == want["parameters"],
        seconds=round(time.monotonic() - began, 1),
        seconds_undisturbed=round(undisturbed, 1),
        seed=seed,
    )


def elsewhere(folder: Path, base: Path, steps: int) -> None:
    """The second measurement."""
    half = steps // 2
    arguments = ("--steps", str(steps), "--every", str(half))
    want = finish(folder, base / "one", *arguments)
    for processes, devices in GANGS:
        run = base / f"on-{processes}x{devices}"
        (run / "records").mkdir(parents=True)
        (record,) = (base / "one" / "records").glob(f"{half:08d}.*.json")
        shutil.copy(record, run / "records")
        split = ("--split", str(min(2, processes * devices)))
        got = finish(folder, run, *arguments, *split, processes=processes, devices=devices)
        losses = [[row["loss"] for row in report["rows"]] for report in (got, want)]
        say(
            "resumed elsewhere",
            saved_on="1 process of 1 device",
            resumed_on=f"{processes} x {devices}",
            after_step=half,
            steps=steps,
            same_tokens=[r["tokens"] for r in got["rows"]] == [r["tokens"] for r in want["rows"]],
            largest_loss_difference=float(np.max(np.abs(np.subtract(*losses)))),
            largest_parameter_difference=_difference(got["checkpoint"], want["checkpoint"]),
        )


def _difference(*checkpoints: str) -> float:
    abstract = tiny.program(1).abstract.model
    models = [restore(path, abstract, part="model.") for path in checkpoints]
    pairs = zip(*map(jax.tree.leaves, models), strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ponente-resume-") as base:
        folder = Path(base, "data")
        tiny.write_data(str(folder))
        killed(folder, Path(base), asked.steps, asked.kills, asked.seed)
        elsewhere(folder, Path(base), 20)


if __name__ == "__main__":
    main()
