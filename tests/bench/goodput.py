"""The account of a run with three kills and two preemptions, from real processes.

    python -m tests.bench.goodput [--steps 300] [--pause 1.0] [--keep DIR]

A tiny model is trained by a process that is ended by SIGKILL, SIGTERM, SIGKILL, SIGTERM, SIGKILL at
steps that follow from --seed, and started again after a pause, until it is done. Then one JSON
object with the parts, what they add up to, and figures that were measured without the journals:
wall and dead time on this process's clock (the ends of processes are in that wall time), and the
steps that were done twice by the lines of metrics.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

ENDS = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL)


def work(root: str, attempt: int, steps: int, checkpoint_every: int) -> None:
    """One attempt: go on from the newest checkpoint that was committed, and tell of every step."""
    from tests.training import tiny
    from training.trainer.run_context import RunContext
    from training.trainer.trainer import train

    ledger = Path(root, "committed.jsonl")
    known = [json.loads(line) for line in ledger.read_text().splitlines()]
    config = dataclasses.replace(
        tiny.TRAIN,
        steps=steps,
        evaluate_every=checkpoint_every,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=3,
    )
    job = tiny.make_job(
        root,
        train=config,
        attempt=str(attempt),
        resume_from=tuple((step, path) for step, path in known if os.path.isdir(path)),
        journal_directory=f"{root}/journal",
        run_directory=f"{root}/runs/{attempt}",
    )

    def on_commit(step: int, path: str) -> None:
        with ledger.open("a") as file:
            file.write(json.dumps([step, path]) + "\n")

    def on_progress(step: int, steps: int, row: Any) -> None:
        print(step, flush=True)
        time.sleep(0.02)  # a step of the tiny model is too short to be hit

    print("began", flush=True)
    result = train(job, RunContext(on_commit=on_commit, on_progress=on_progress))
    print("preempted" if result.preempted else "finished", flush=True)


def attempts(root: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start, end and start again; when each attempt began and ended, its status and last words."""
    rng = random.Random(options.seed)
    # In the middle of what is between two checkpoints, each further on than the one before.
    share = options.steps // (len(ENDS) + 1)
    ends = [share * (n + 1) + rng.randrange(-share // 4, share // 4) for n in range(len(ENDS))]
    found = []
    for number in range(len(ENDS) + 1):
        due = ENDS[number] if number < len(ENDS) else None
        command = [sys.executable, "-m", "tests.bench.goodput", "--worker", root, str(number)]
        command += ["--steps", str(options.steps), "--every", str(options.every)]
        log = Path(root, f"log-{number}.txt")
        with log.open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert process.stdout is not None
            sent, said, times = None, "", {}
            for line in process.stdout:
                said = line.strip()
                times.setdefault(said, time.monotonic())
                told = int(said) if said.isdigit() else 0
                if due is not None and sent is None and told >= ends[number]:
                    process.send_signal(due)
                    sent = due
            status = process.wait()
        if status != (-9 if sent == signal.SIGKILL else 0):
            raise RuntimeError(f"attempt {number}: status {status}: {log.read_text()[-2000:]}")
        began, ended = times["began"], time.monotonic()
        found.append({"began": began, "ended": ended, "status": status, "said": said})
        if number < len(ENDS):
            time.sleep(options.pause)
    return found


def done_twice(root: str) -> int:
    """Steps by the lines of every attempt, less those of the run."""
    from training.metrics.history import read_log

    steps = [
        entry["step"]
        for path in Path(root, "runs").iterdir()
        for entry in read_log(str(path))
        if entry["kind"] == "step"
    ]
    return len(steps) - len(set(steps))


def measure(root: str, options: argparse.Namespace) -> None:
    """Print the account."""
    from tests.training import tiny
    from training.metrics.goodput import account
    from training.metrics.journal import read_journals

    tiny.write_data(root)
    Path(root, "committed.jsonl").touch()
    tried = attempts(root, options)
    found = account(read_journals(f"{root}/journal"))
    # From the call of `train` in the first process to the end of the last one.
    wall = tried[-1]["ended"] - tried[0]["began"]
    dead = sum(b["began"] - a["ended"] for a, b in pairwise(tried))
    line = {
        "measure": "goodput",
        "parts": {name: round(seconds, 3) for name, seconds in found.parts.items()},
        "shares": {name: round(part / found.total, 4) for name, part in found.parts.items()},
        "total_s": round(found.total, 3),
        "parts_add_up_to": round(sum(found.parts.values()) / found.total, 6),
        "goodput": round(found.goodput, 4),
        "attempts": len(found.spans),
        "kills": sum(each["status"] == -9 for each in tried),
        "preemptions": sum(each["said"] == "preempted" for each in tried),
        "wall_s_by_the_bench": round(wall, 3),
        "total_over_wall_by_the_bench": round(found.total / wall, 4),
        "dead_s_by_the_bench": round(dead, 3),
        "steps": options.steps,
        "steps_done_twice_by_the_lines": done_twice(root),
        "versions": {"jax": version("jax")},
    }
    print(json.dumps(line), flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the bench, or be one of its processes."""
    flags = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    flags.add_argument("--steps", type=int, default=300)
    flags.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    flags.add_argument("--pause", type=float, default=1.0, help="seconds before a new attempt")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--keep", help="work here, and leave everything")
    flags.add_argument("--worker", nargs=2, metavar=("ROOT", "ATTEMPT"))
    options = flags.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.worker:
        root, number = options.worker
        work(root, int(number), options.steps, options.every)
    elif options.keep:
        Path(options.keep).mkdir(parents=True)
        measure(options.keep, options)
    else:
        with tempfile.TemporaryDirectory() as root:
            measure(root, options)


if __name__ == "__main__":
    main()
