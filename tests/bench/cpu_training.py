"""A tiny model trained on the CPU: rate, imports, time to a first step, memory.

    python -m tests.bench.cpu_training

One JSON object a line on stdout. The model has 4 layers, width 128, 4 heads and an inner width of
512, in float32; a step is 8 rows of 256 random tokens. Every run is a process of its own, `--runs`
for each vocabulary: `training.trainer.trainer.train` with its loader, on a token cache that was
written beforehand, without a persistent compilation cache. `tokens_per_second` is of the median
step after ten, `tokens_per_cpu_second` their mean over processor time of the whole process, which
other jobs on the machine disturb less. `first_step_s` is from the start of the process until the
first loss has been read. Last come, for each vocabulary, the medians over the runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench import cpu_training_ours
from tests.bench.cpu_training_measure import Options, emit

ROOT = Path(__file__).parents[2]
OURS = [sys.executable, "-m", "tests.bench.cpu_training_ours"]
FIGURES = [
    "import_s",
    "first_step_s",
    "first_step_cpu_s",
    "tokens_per_second",
    "tokens_per_cpu_second",
    "peak_rss_mib",
]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[1024, 32_768])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--remat", default="", help="this project's setting; default: its default")
    flags = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="cpu_training-") as scratch:
        for vocab in flags.vocab:
            work = Path(scratch) / str(vocab)
            work.mkdir()
            options = Options(
                born=0.0, work=str(work), vocab=vocab, steps=flags.steps, remat=flags.remat
            )
            cpu_training_ours.prepare(work, vocab, options.tokens * (flags.steps + 1))
            _repeat(options, flags.runs)
    return 0


def _repeat(options: Options, runs: int) -> None:
    found: list[dict[str, Any]] = []
    for run in range(runs):
        with tempfile.TemporaryDirectory(dir=options.work) as own:
            record = _run(dataclasses.replace(options, work=_with_cache(own)))
        emit({**record, "run": run})
        if "failed" not in record:
            found.append(record)
    if found:
        about = {"name": "ponente", "vocab": options.vocab, "median_of": len(found)}
        emit(about | _medians(found))


def _with_cache(own: str) -> str:
    """`own`, a new directory beside the token cache, as a run's directory with that cache in it."""
    for name in ("cache", "cache.txt"):
        (Path(own) / name).symlink_to(Path(own).parent / name)
    return own


def _medians(records: list[dict[str, Any]]) -> dict[str, float]:
    return {
        figure: round(statistics.median(record[figure] for record in records), 2)
        for figure in FIGURES
    }


def _run(options: Options) -> dict[str, Any]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    options = dataclasses.replace(options, born=time.monotonic())
    done = subprocess.run(
        [*OURS, json.dumps(dataclasses.asdict(options))],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    if lines and not done.returncode:
        return json.loads(lines[-1])
    reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"name": "ponente", "vocab": options.vocab, "failed": reason}


if __name__ == "__main__":
    raise SystemExit(main())
