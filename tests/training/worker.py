"""One process of the two-process test: trains the tiny run and writes what it saw.

Arguments: data folder, result file, number of processes, index, port, `Parallelism` as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def main() -> None:
    """Train and write losses, evaluations and commits as JSON."""
    root, output, count, index, port, parallel = sys.argv[1:]
    from models.shape.validation import from_plain
    from tests.training import tiny
    from training.config import Parallelism
    from training.config.job import MetricsRow
    from training.sharding.distributed import joined
    from training.trainer import trainer

    layout = from_plain(Parallelism, json.loads(parallel))
    config = dataclasses.replace(tiny.TRAIN, parallel=layout)
    job = tiny.make_job(
        root,
        train=config,
        checkpoint_directory=f"{root}/checkpoints-{count}",
    )
    rows: list[MetricsRow] = []
    run_context, heard = trainer.run_context, tiny.Heard()

    @contextmanager
    def seen(*arguments: Any, **options: Any) -> Iterator[Any]:
        """Every process sees the same numbers, and process 0 writes them."""
        with run_context(*arguments, **options) as run:
            row, event = run.row, run.event
            run.row = lambda found: (rows.append(found), row(found))
            run.event = lambda kind, **fields: (
                evaluations.append(fields) if kind == "evaluation" else None,
                event(kind, **fields),
            )
            yield run

    evaluations: list[MetricsRow] = []
    trainer.run_context = seen
    address = f"127.0.0.1:{port}" if int(count) > 1 else None
    with joined(address, int(count), int(index)):
        result = trainer.train(job, heard)
    report = {
        "rows": tiny.learned(rows),
        "evaluations": evaluations,
        "committed": heard.committed,
        "steps": result.steps,
        "compilations": result.compilations,
    }
    with open(output, "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()
