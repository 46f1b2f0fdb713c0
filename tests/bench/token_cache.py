"""Documents to a token cache: ours beside the bare encoders, on one corpus.

    python -m tests.bench.token_cache --corpus DIR

DIR holds Parquet files with a column `text`, and `tokenizer.json`. One JSON object a measurement.
First the corpus is copied into Parquet files as `steps.sample` writes them, about 16 MiB of text in
a row group (1 MiB for `tokenizers`, which takes seconds for that: more and shorter turns). Then,
with each back end in a process of its own (a fast encoder remembers words, so no text is timed
twice in one process), row groups are taken in turn for

- `limit`: the bare library on texts already in memory, ids left where they are;
- `ours`: the shard writer of `steps.tokenize`, from the Parquet file to checked bytes on disk.

Rates are per wall second and per processor second, the median over row groups without the first of
each; `share` is ours over the limit. `processes` runs the shard writer in two processes, `step` the
whole step in one process on all cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench import token_cache_ours

_SMALL = 1 << 20
ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--files", type=int, default=3, help="Parquet files for the fast encoder")
    parser.add_argument("--slow-files", type=int, default=1, help="for the slow one")
    parser.add_argument("--documents", type=int, default=0, help="of each of these; 0 for all")
    flags = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="token_cache-") as scratch:
        large, small = Path(scratch) / "large", Path(scratch) / "small"
        token_cache_ours.prepare(flags.corpus, large, flags.files, 0)
        token_cache_ours.prepare(flags.corpus, small, flags.slow_files, flags.documents, _SMALL)
        _ours("parquet", "none", large, scratch)
        for backend, prepared in (("fastokens", large), ("tokenizers", small)):
            for measure in ("backend", "processes", "step"):
                _ours(measure, backend, prepared, scratch)
    return 0


def _ours(measure: str, backend: str, prepared: Path, scratch: str) -> None:
    script = "tests.bench.token_cache_ours"
    command = [sys.executable, "-m", script, measure, backend, str(prepared), scratch]
    _run(command, f"ours {measure} {backend}")


def _run(command: list[str], name: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    lines = [line for line in found.stdout.splitlines() if line.startswith('{"measure"')]
    for line in lines:
        print(line, flush=True)
    if found.returncode or not lines:
        reason = (found.stderr.strip().splitlines() or ["no output"])[-1]
        print(json.dumps({"measure": name, "failed": reason}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
