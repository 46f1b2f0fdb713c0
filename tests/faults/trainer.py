"""A trainer process to be killed, stopped and frozen: the tiny run, resumed from its own records.

    python -m tests.faults.trainer FOLDER [options]

FOLDER holds the token shards of `tests.training.tiny`; checkpoints and their records go below
`--run`. The process prints "step N" after every step and leaves `report-I.json` at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--run", required=True, help="folder of this run")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=99)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after every step")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--parallel", type=json.loads, help="fields of `Parallelism`")
    parser.add_argument("--watchdog", type=float, default=120.0)
    parser.add_argument("--stuck-at", type=int, default=0, help="step after which to do nothing")
    parser.add_argument("--profile", action="store_true", help="trace a step in the middle")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds more of long phases")
    return parser.parse_args()


def recorded(run: Path) -> tuple[tuple[int, str], ...]:
    """Checkpoints that have a record, oldest first."""
    lines = [json.loads(path.read_text()) for path in (run / "records").glob("*.json")]
    return tuple(sorted((line["step"], line["path"]) for line in lines))


def main() -> None:
    asked = options()
    run, began = Path(asked.run), time.time()
    (run / "records").mkdir(parents=True, exist_ok=True)
    from tests.training import tiny
    from training.config import Parallelism
    from training.metrics.stopwatch import Stopwatch
    from training.sharding.distributed import joined
    from training.trainer.trainer import train

    attempt = os.environ.get("ATTEMPT") or uuid.uuid4().hex[:8]
    before = {"starting": began - process_started(), "importing": time.time() - began}

    def commit(step: int, path: str) -> None:
        name = run / "records" / f"{Path(path).name}.json"
        part = name.with_suffix(".part")
        part.write_text(json.dumps({"step": step, "path": path}))
        os.replace(part, name)

    def drop(step: int, path: str) -> None:
        (run / "records" / f"{Path(path).name}.json").unlink()

    def progress(step: int, steps: int, row: dict[str, float]) -> None:
        print(f"step {step}", flush=True)  # noqa: T201 - what the parent reads
        time.sleep(asked.pause)

    def event(kind: str, **fields: Any) -> None:
        print(f"event {kind} {json.dumps(fields)}", flush=True)  # noqa: T201

    config = dataclasses.replace(
        tiny.TRAIN,
        steps=asked.steps,
        checkpoint_every=asked.every,
        keep_checkpoints=asked.keep,
        evaluate_every=max(asked.every, 10),
        watchdog_seconds=asked.watchdog,
        profile=(asked.steps // 2, 1) if asked.profile else None,
        parallel=Parallelism(**asked.parallel) if asked.parallel else tiny.TRAIN.parallel,
    )
    job = tiny.make_job(
        asked.folder,
        train=config,
        checkpoint_directory=str(run / "checkpoints"),
        attempt=attempt,
        resume_from=recorded(run),
        run_directory=str(run / "attempts" / attempt),
        shared_directory=str(run / "shared"),
    )
    if asked.stuck_at:
        _get_stuck(asked.stuck_at)
    if asked.slow:
        _be_slow(asked.slow)
    watch = Stopwatch(before=before)
    address = f"127.0.0.1:{asked.port}" if asked.processes > 1 else None
    listener = tiny.Heard(commit=commit, drop=drop, progress=progress, event=event)
    with joined(address, asked.processes, asked.index):
        watch.ended("joining")
        result = train(job, listener, watch)
    report = {
        "steps": result.steps,
        "preempted": result.preempted,
        "compilations": result.compilations,
        "rows": tiny.learned(tiny.rows(result)),
        "evaluations": tiny.rows(result, "evaluations"),
        "checkpoint": result.checkpoint,
        "parameters": digest(result.checkpoint) if result.checkpoint else "",
    }
    (run / f"report-{asked.index}.json").write_text(json.dumps(report))


def _get_stuck(step: int) -> None:
    """From this step on this process asks nobody and does nothing, as one waiting for a disk."""
    from training.fault import Watchdog

    beat = Watchdog.beat

    def stuck(self: Watchdog, now: int) -> None:
        beat(self, now)
        if now >= step:
            print(f"stuck at {now}", flush=True)  # noqa: T201
            time.sleep(3600)

    Watchdog.beat = stuck  # pyrefly: ignore


def _be_slow(seconds: float) -> None:
    """Copying the state for a checkpoint, an evaluation and a profile take so much longer."""
    from training.checkpoint.device_to_host import HostCopies
    from training.evaluate.evaluator import Evaluator
    from training.metrics.profiler import Profiler

    def slow(kind: Any, name: str) -> None:
        method = getattr(kind, name)

        def slowed(*arguments: Any) -> Any:
            print(f"slow {kind.__name__}", flush=True)  # noqa: T201
            time.sleep(seconds)
            return method(*arguments)

        setattr(kind, name, slowed)

    slow(HostCopies, "take")
    slow(Evaluator, "__call__")
    slow(Profiler, "before")


def process_started() -> float:
    """Unix time at which this process began."""
    import psutil

    return psutil.Process().create_time()


def digest(checkpoint: str) -> str:
    """SHA-256 over the parameters and moments of a checkpoint, as one device sees them."""
    import jax
    import numpy as np

    from tests.training import tiny
    from training.checkpoint.restore import restore

    if jax.process_count() > 1:
        return ""
    state = restore(checkpoint, tiny.program(1).abstract)
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
