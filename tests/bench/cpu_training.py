"""A tiny model trained on the CPU, beside Levanter: rate, imports, time to a first step, memory.

    python -m tests.bench.cpu_training --peers-python ENV/bin/python

One JSON object a line on stdout. The model has 4 layers, width 128, 4 heads and an inner width of
512, in float32; a step is 8 rows of 256 random tokens. Every run is a process of its own; the two
systems take turns, `--runs` times for each vocabulary. `tokens_per_second` is of the median step
after ten, `tokens_per_cpu_second` their mean over processor time of the whole process, which other
jobs on the machine disturb less. `first_step_s` is from the start of the process until the
first loss has been read. Neither has a persistent compilation cache. Last come, for each
vocabulary, the medians of each system over the runs, and ours over theirs.

This project runs `training.trainer.trainer.train`, data loader included, on a token cache that was
written beforehand; Levanter runs its `Trainer` on batches that were made beforehand.
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

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FIGURES = (
    *("import_s", "first_step_s", "first_step_cpu_s", "tokens_per_second"),
    *("tokens_per_cpu_second", "peak_rss_mib"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers-python", type=Path, help="of an environment with Levanter")
    parser.add_argument("--vocab", type=int, nargs="+", default=[1024, 32_768])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--remat", default="", help="this project's setting; default: its default")
    flags = parser.parse_args(arguments)
    if flags.peers_python is None:
        emit({"name": "levanter", "skipped": "no --peers-python was given"})
    with tempfile.TemporaryDirectory(prefix="cpu_training-") as scratch:
        for vocab in flags.vocab:
            work = Path(scratch) / str(vocab)
            work.mkdir()
            options = Options(
                born=0.0, work=str(work), vocab=vocab, steps=flags.steps, remat=flags.remat
            )
            cpu_training_ours.prepare(work, vocab, options.tokens * (flags.steps + 1))
            _take_turns(options, flags.peers_python, flags.runs)
    return 0


def _take_turns(options: Options, peer: Path | None, runs: int) -> None:
    commands = {"ponente": [sys.executable, "-m", "tests.bench.cpu_training_ours"]}
    if peer is not None:
        commands["levanter"] = [str(peer), str(HERE / "cpu_training_levanter.py")]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for turn in range(runs):
        for name, command in commands.items():
            with tempfile.TemporaryDirectory(dir=options.work) as own:
                record = _run(name, command, dataclasses.replace(options, work=_with_cache(own)))
            emit({**record, "run": turn})
            if "failed" not in record:
                found[name].append(record)
    medians = {name: _medians(records) for name, records in found.items() if records}
    for name, figures in medians.items():
        emit({"name": name, "vocab": options.vocab, "median_of": len(found[name]), **figures})
    if {"ponente", "levanter"} <= medians.keys():
        ours, theirs = medians["ponente"], medians["levanter"]
        ratios = {figure: round(ours[figure] / theirs[figure], 3) for figure in FIGURES}
        emit({"name": "ponente over levanter", "vocab": options.vocab, **ratios})


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


def _run(name: str, command: list[str], options: Options) -> dict[str, Any]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    options = dataclasses.replace(options, born=time.monotonic())
    done = subprocess.run(
        [*command, json.dumps(dataclasses.asdict(options))],
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
    return {"name": name, "vocab": options.vocab, "failed": reason}


if __name__ == "__main__":
    raise SystemExit(main())
