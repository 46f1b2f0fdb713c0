"""One process of the tests of scoring by several: writes what it found as JSON.

Arguments: data folder, result file, number of processes, index, port, checkpoint, and what fails
once in the last process while they follow a run of that checkpoint; without it, it is scored.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any


def main() -> None:
    root, output, count, index, port, checkpoint, *failing = sys.argv[1:]
    from tests.training import tiny
    from training.evaluate.checkpoint_scorer import Scorer
    from training.sharding.distributed import joined

    address = f"127.0.0.1:{port}" if int(count) > 1 else None
    with joined(address, int(count), int(index)):
        if failing:
            if int(index) == int(count) - 1:
                fail_once(failing[0])
            found = followed(checkpoint)
        else:
            scorer = Scorer(tiny.score_job(root))
            found = dataclasses.asdict(scorer.score(scorer.load(checkpoint)))
    with open(output, "w") as file:
        json.dump(found, file)


def followed(checkpoint: str) -> dict[str, Any]:
    """What was loaded, kept and skipped of a run of one checkpoint, and whether it ended."""
    import jax

    from tests.training import tiny
    from training.checkpoint.restore import load_model_onto
    from training.evaluate.checkpoint_scorer import Next, Scored, follow
    from training.sharding.layout import make_layout

    report: dict[str, Any] = {"loads": 0, "kept": [], "skipped": []}

    class Scorer:
        """Reads the model and finds nothing."""

        def load(self, path: str) -> Any:
            report["loads"] += 1
            return load_model_onto(make_layout(jax.devices()), path, tiny.MODEL)

        def score(self, model: Any) -> Scored:
            return Scored(rows=[], samples=[])

    ended = follow(
        Scorer(),
        lambda: Next("a", 1, checkpoint, end=bool(report["kept"] or report["skipped"])),
        lambda found, scored: report["kept"].append(found.step),
        lambda found, cause: report["skipped"].append(cause),
    )
    return {**report, "ended": ended}


def fail_once(what: str) -> None:
    """Let the first read of the checkpoint's "index", or of its "arrays", fail in this process.

    "disk" fails at the index too, with an error that is not one of this project.
    """
    from pipeline.errors import StoreUnavailable
    from training.checkpoint import files, restore

    owner, name = (restore, "read_arrays") if what == "arrays" else (files.storage, "read_bytes")
    read = getattr(owner, name)

    def failing(path: str, *rest: Any) -> Any:
        setattr(owner, name, read)
        raise OSError(5, "EIO", path) if what == "disk" else StoreUnavailable(f"{path}: 503")

    setattr(owner, name, failing)


if __name__ == "__main__":
    main()
