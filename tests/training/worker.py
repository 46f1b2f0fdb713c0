"""One process of the two-process test: trains the tiny run and writes what it saw.

Arguments: data folder, result file, number of processes, index, port; a sixth argument is the step
at which the process sends itself SIGTERM.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys


def main() -> None:
    """Train and write losses, evaluations and commits as JSON."""
    root, output, count, index, port = sys.argv[1:6]
    stop_at = int(sys.argv[6]) if len(sys.argv) > 6 else None
    from tests.training import tiny
    from training.distributed import Coordinator
    from training.loop import train

    coordinator = Coordinator(f"127.0.0.1:{port}", int(count), int(index))
    committed: list[tuple[int, str]] = []

    def on_progress(step: int, steps: int, row: object) -> None:
        # Process 0 alone reports progress, so the signal goes to one process only.
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    config = dataclasses.replace(tiny.TRAIN, parallel=tiny.split(2))
    if stop_at is not None:
        # The same in every process, and long enough that the agreed step comes before the last.
        config = dataclasses.replace(config, steps=2000, evaluate_every=2000, checkpoint_every=2000)
    job = tiny.make_job(
        root,
        train=config,
        checkpoint_directory=f"{root}/checkpoints-{count}",
    )
    result = train(
        job,
        coordinator=coordinator if int(count) > 1 else None,
        on_commit=lambda step, path: committed.append((step, path)),
        on_progress=on_progress,
    )
    report = {
        "rows": tiny.learned(result.history),
        "evaluations": result.evaluations,
        "committed": committed,
        "steps": result.steps,
        "preempted": result.preempted,
        "compilations": result.compilations,
    }
    with open(output, "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()
