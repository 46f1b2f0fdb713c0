"""One process of the two-process test of scoring: scores a checkpoint, writes what it found.

Arguments: data folder, result file, number of processes, index, port, checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import sys


def main() -> None:
    root, output, count, index, port, checkpoint = sys.argv[1:]
    from tests.training import tiny
    from training.evaluate.checkpoint_scorer import Scorer
    from training.sharding.distributed import joined

    address = f"127.0.0.1:{port}" if int(count) > 1 else None
    with joined(address, int(count), int(index)):
        scorer = Scorer(tiny.score_job(root))
        scored = dataclasses.asdict(scorer.score(scorer.load(checkpoint)))
    with open(output, "w") as file:
        json.dump(scored, file)


if __name__ == "__main__":
    main()
