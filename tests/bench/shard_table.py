"""What the reader of a token cache of many shards pays for the cache's manifest.

    python -m tests.bench.shard_table                         100,000 shards of seven files
    python -m tests.bench.shard_table --inline                the shards in the manifest itself
    python -m tests.bench.shard_table --inline --checkout DIR read by the code of another checkout

One JSON object on stdout: bytes of the manifest and of its table, and of one fresh process the
seconds until the cache's training shards are known, seconds of 1,000 look-ups of a shard by name,
and the peak of resident memory above that of the imports. No token is written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_FILES, _LOOK_UPS = 7, 1000
_HERE = Path(__file__)


def write(root: Path, count: int, *, inline: bool) -> None:
    """A manifest of `count` shards in the directory `root`."""
    trees = [
        {
            "name": f"train/{number:06d}",
            "root": f"attempts/000001-bench/shards/train/{number:06d}",
            "files": [
                {
                    "path": f"cache/tokens/c/{file}",
                    "size": 1 << 20,
                    "sha256": hashlib.sha256(b"%d %d" % (number, file)).hexdigest(),
                    "blocks": "",
                }
                for file in range(_FILES)
            ],
            "result": {"tokens": 1 << 20, "check": f"{number:016x}", "documents": 1000},
        }
        for number in range(count)
    ]
    table: Any = trees
    if not inline:
        from pipeline.store.shards import File, Shard, ShardTable, keep_shards

        shards = [Shard(**{**t, "files": tuple(File(**f) for f in t["files"])}) for t in trees]
        kept = keep_shards(str(root), "000001-bench", shards)
        assert isinstance(kept, ShardTable)
        table = vars(kept.table)
    fields = {"label": "tokenize", "content": "", "recipe": "", "attempt": "000001-bench"}
    fields |= {"build": "", "origin": None, "sources": {}, "schema": 4 if inline else 5}
    numbers = {"version": 1, "started": 0.0, "seconds": 1.0}
    plain: dict[str, Any] = {"config": {}, "inputs": {}, "result": {}, "provenance": {}}
    tree = {"key": "0" * 64, "step": "tokenize", **fields, **numbers, **plain, "shards": table}
    (root / "manifest.json").write_text(json.dumps(tree))


def _peak_mib() -> float:
    # Not of `getrusage`, whose peak begins with that of the process before `exec`.
    (line,) = [w for w in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in w]
    return int(line.split()[1]) / 2**10


def read(root: str) -> dict[str, Any]:
    """Open the cache in this process; see the module."""
    import data.cache.token_shard  # noqa: F401 - its imports are not part of the memory
    from pipeline.store.manifest import load
    from steps.artifacts import TokenCache

    before, clock = _peak_mib(), time.perf_counter()
    found = load(root)
    assert found is not None
    shards = TokenCache(root, found).split("train")
    seconds, peak = time.perf_counter() - clock, _peak_mib() - before
    clock = time.perf_counter()
    for number in range(_LOOK_UPS):
        found.shard(f"train/{number * (len(shards) // _LOOK_UPS):06d}")
    looked = time.perf_counter() - clock
    return {"open_s": seconds, "peak_mib": peak, "look_ups_s": looked}


def main() -> None:
    """Write, then read in a process of its own."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--shards", type=int, default=100_000)
    options.add_argument("--inline", action="store_true")
    options.add_argument("--checkout", default=".")
    options.add_argument("--read", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.read:
        sys.stdout.write(json.dumps(read(given.read)) + "\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "store", f"tokenize-{'0' * 20}")
        root.mkdir(parents=True)
        write(root, given.shards, inline=given.inline)
        sizes = {p.suffix[1:]: p.stat().st_size for p in root.rglob("*.json*")}
        command = [sys.executable, str(_HERE.resolve()), "--read", str(root)]
        environment = {**os.environ, "PYTHONPATH": str(Path(given.checkout).resolve())}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    answer = {"shards": given.shards, "bytes": sizes, **json.loads(done.stdout)}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
