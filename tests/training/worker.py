"""One process of the two-process test: trains the tiny run and writes what it saw.

Arguments: data folder, result file, number of processes, index, port, `Parallelism` as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any


def main() -> None:
    """Train and write losses, evaluations and commits as JSON."""
    root, output, count, index, port, parallel = sys.argv[1:]
    from models.shape.validation import from_plain
    from tests.training import tiny
    from training.config import Parallelism
    from training.config.job import MetricsRow
    from training.sharding.distributed import Coordinator
    from training.trainer.run_context import RunContext
    from training.trainer.trainer import train

    coordinator = Coordinator(f"127.0.0.1:{port}", int(count), int(index))
    committed: list[tuple[int, str]] = []

    layout = from_plain(Parallelism, json.loads(parallel))
    config = dataclasses.replace(tiny.TRAIN, parallel=layout)
    job = tiny.make_job(
        root,
        train=config,
        checkpoint_directory=f"{root}/checkpoints-{count}",
    )

    class Seen(RunContext):
        """Every process sees the same numbers, and process 0 writes them."""

        def row(self, row: MetricsRow) -> None:
            seen["rows"].append(row)
            super().row(row)

        def event(self, kind: str, **fields: Any) -> None:
            if kind == "evaluation":
                seen["evaluations"].append(fields)
            super().event(kind, **fields)

    seen: dict[str, list[MetricsRow]] = {"rows": [], "evaluations": []}
    context = Seen(
        coordinator=coordinator if int(count) > 1 else None,
        on_commit=lambda step, path: committed.append((step, path)),
    )
    result = train(job, context)
    report = {
        "rows": tiny.learned(seen["rows"]),
        "evaluations": seen["evaluations"],
        "committed": committed,
        "steps": result.steps,
        "compilations": result.compilations,
    }
    with open(output, "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()
