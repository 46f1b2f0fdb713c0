"""Fault 6: kill -9 while a checkpoint is being saved.

A process saves one checkpoint after another and records each. It is killed when the files of its
attempt have reached some number, another one in every trial. What is recorded then restores with
the bits that were saved; it is of the step that was being saved, or of the one before.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tests.faults.checkpoint_full import Run
from tests.faults.registry import Fault, trials
from tests.training import tiny
from training.checkpoint.restore import newest_sound

_ARRAYS = 12
_FILES = 2 * _ARRAYS + 2  # of a checkpoint
_MOST = 3 * _FILES - 8  # two that are kept, and most of the one being saved
_PATIENCE_SECONDS = 120.0


def state(step: int) -> dict[str, Any]:
    """Arrays of 128 KiB, other values at every step."""
    values = np.random.default_rng(step).standard_normal((_ARRAYS, 1 << 15)).astype(np.float32)
    return {f"a{i}": jax.numpy.asarray(values[i]) for i in range(_ARRAYS)}


def save_for_ever(root: Path) -> None:
    """The process that is killed: says "n" before it saves step n."""
    run = Run(root)
    for step in range(1, 10_000):
        new = state(step)
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
        run.checkpointer.save(step, new, {"rows": []})


def _files(root: Path) -> int:
    """Files under the attempt; directories may go away meanwhile."""
    return sum(len(names) for _, _, names in os.walk(root / "attempts"))


def kill_while_saving(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """One process a trial."""
    figures: Counter[str] = Counter()

    def trial(number: int) -> None:
        numbers, root = random.Random(number), workspace / str(number)
        begun = _killed(root, at=numbers.randrange(1, _MOST))
        run = Run(root, "2-next")
        recorded = run.recorded()
        found = newest_sound(recorded, tiny.like(state(0)))
        step = 0 if found is None else found[0]
        assert begun - 2 <= step <= begun, f"step {begun} was being saved, {step} is the newest"
        if found is not None:
            assert found[0] == recorded[-1][0], "a recorded checkpoint is not sound"
            assert tiny.equal(found[2], state(step))
        figures["nothing saved yet"] += found is None
        figures["an interval lost"] += step < begun
        shutil.rmtree(root)

    return {"trials": trials(seed, count, trial), **figures}


def _killed(root: Path, at: int) -> int:
    """Start the process, kill it at that many files; returns the step it was saving."""
    command = [sys.executable, "-m", "tests.faults.checkpoint_kill", str(root)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "JAX_PLATFORMS": "cpu"}, text=True
    ) as process:
        end = time.monotonic() + _PATIENCE_SECONDS
        try:
            while _files(root) < at and process.poll() is None and time.monotonic() < end:
                time.sleep(0.0005)
        finally:
            early = process.poll()
            process.kill()
        said, _ = process.communicate()
    assert early is None, f"the process ended by itself with {early}"
    assert said, "the process saved nothing in time"
    return int(said.split()[-1])


FAULTS = {6: [Fault("kill -9 while a checkpoint is saved", 2, 50, kill_while_saving)]}

if __name__ == "__main__":
    save_for_ever(Path(sys.argv[1]))
