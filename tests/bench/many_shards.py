"""A token cache of many shards: how fast it opens, what it holds in memory, how soon it answers.

    python -m tests.bench.many_shards                                    1,000 shards, 100 M tokens
    python -m tests.bench.many_shards --shards 10000 --tokens 20000000

One JSON object a measurement on stdout. The tokens are random and the files in the page cache, so
times are of the code and not of a disk. Reading is measured in processes of its own (`cold`: the
first batch of a process, which has everything still to open) whose limit of open files is the usual
1,024. A batch is 128 rows of 2048, at random multiples of 2048 of all shards.

`tensorstore` is TensorStore's own Zarr reader on the same files, as a loader without our code would
use it: every shard opened before it is read, the rows of a batch in one `ts.Batch`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from data.cache import token_shard
from data.cache.token_array import TokenArray
from data.cache.token_shard import TokenShard

ROWS, LENGTH, VOCABULARY = 128, 2048, 32_768
_LIST = "shards.json"


def write(root: Path, shards: int, tokens: int) -> dict[str, Any]:
    """Write the shards; they differ in a few tokens of each and have random ids."""
    numbers = np.random.default_rng(0)
    each = tokens // shards
    ids = numbers.integers(1, VOCABULARY, each, np.uint32)
    written, clock, cpu = [], time.perf_counter(), time.process_time()
    for index in range(shards):
        lengths = np.full(-(-each // 1000), 999)
        lengths[-1] -= lengths.sum() + len(lengths) - each
        mine = ids[: lengths.sum()].copy()
        mine[::1000] = 1 + index % (VOCABULARY - 1)
        directory = str(root / f"{index:05d}")
        counts = token_shard.write_shard(
            directory, [(mine, lengths)], vocab_size=VOCABULARY, eos_id=0
        )
        written.append(TokenShard(directory, counts.tokens, counts.check))
    seconds, cpu = time.perf_counter() - clock, time.process_time() - cpu
    (root / _LIST).write_text(json.dumps(written))
    total = sum(shard.tokens for shard in written)
    return {"tokens": total, "wall_s": seconds, "cpu_s": cpu, "tokens_per_cpu_s": total / cpu}


def resident_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Ours:
    """`TokenArray`."""

    def __init__(self, shards: list[TokenShard]) -> None:
        self._array = TokenArray(shards, VOCABULARY)
        self.ends = self._array.shard_ends

    def read(self, shards: np.ndarray, begins: np.ndarray) -> np.ndarray:
        """Rows that begin at these tokens of these shards: int32 [n, LENGTH]."""
        return self._array.read(
            (self.ends - np.diff(self.ends, prepend=0))[shards] + begins, LENGTH
        )


class TensorStore:
    """TensorStore's own reader, with nothing of ours."""

    def __init__(self, shards: list[TokenShard]) -> None:
        context = ts.Context({"cache_pool": {"total_bytes_limit": 256 << 20}})
        options = {
            "fill_missing_data_reads": False,
            "recheck_cached_data": "open",
            "recheck_cached_metadata": "open",
        }
        opening = []
        for shard in shards:
            store = {"driver": "file", "path": f"{shard.directory}/tokens/"}
            spec = {"driver": "zarr3", "kvstore": store, **options}
            opening.append(ts.open(spec, read=True, open=True, context=context))
        self._arrays = [array.result() for array in opening]
        self.ends = np.cumsum([shard.tokens for shard in shards])

    def read(self, shards: np.ndarray, begins: np.ndarray) -> np.ndarray:
        """As `Ours.read`."""
        out = np.empty((len(shards), LENGTH), np.int32)
        with ts.Batch() as batch:
            reads = [
                self._arrays[shard][begin : begin + LENGTH].read(batch=batch)
                for shard, begin in zip(shards.tolist(), begins.tolist(), strict=True)
            ]
        for row, read in zip(out, reads, strict=True):
            row[:] = read.result()
        return out


def measure(root: Path, which: str, seconds: float) -> dict[str, Any]:
    """Open and read in this process; see the module."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    shards = [TokenShard(*row) for row in json.loads((root / _LIST).read_text())]
    rows = np.array([shard.tokens // LENGTH for shard in shards])
    numbers, before, clock = np.random.default_rng(), resident_mib(), time.perf_counter()
    reader = {"ours": Ours, "tensorstore": TensorStore}[which](shards)
    opened = {"open_s": time.perf_counter() - clock, "open_mib": resident_mib() - before}

    def batch() -> float:
        chosen = numbers.integers(0, len(shards), ROWS)
        begins = (numbers.random(ROWS) * rows[chosen]).astype(np.int64) * LENGTH
        clock = time.perf_counter()
        reader.read(chosen, begins)
        return time.perf_counter() - clock

    first = {"first_batch_s": batch(), "first_batch_mib": resident_mib() - before}
    clock, cpu = time.perf_counter(), time.process_time()
    for begin in range(0, len(shards), ROWS):
        every = np.arange(begin, min(begin + ROWS, len(shards)))
        reader.read(every, every * 0)
    first["meet_every_shard_s"] = time.perf_counter() - clock
    first["meet_every_shard_cpu_s"] = time.process_time() - cpu
    clock, cpu = time.perf_counter(), time.process_time()
    times = [batch()]
    while time.perf_counter() - clock < seconds:
        times.append(batch())
    wall, cpu = time.perf_counter() - clock, time.process_time() - cpu
    tokens = len(times) * ROWS * LENGTH
    steady = {
        "tokens_per_s": tokens / wall,
        "tokens_per_cpu_s": tokens / cpu,
        "batch_s_median": statistics.median(times),
        "batch_s_max": max(times),
        "mib": resident_mib() - before,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "open_files": _files(),
    }
    return {"shards": len(shards), **opened, **first, **steady}


def _cold(root: Path, which: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.many_shards", "--measure", which]
    command += ["--root", str(root), "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": " ".join(done.stderr.split())[-300:]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.many_shards", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=100_000_000, help="of all shards")
    parser.add_argument("--seconds", type=float, default=3.0, help="of steady reading, a process")
    parser.add_argument("--repeat", type=int, default=3, help="processes that read")
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", choices=("ours", "tensorstore"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tokens < LENGTH * options.shards:
        parser.error(f"--tokens: expected at least {LENGTH} for each shard")
    if options.measure:
        print(json.dumps(measure(options.root, options.measure, options.seconds)))
        return
    about = {
        "python": platform.python_version(),
        "tensorstore": version("tensorstore"),
        "numpy": version("numpy"),
        "cores": os.cpu_count(),
    }
    print(json.dumps({"measured": "versions", **about}))
    with tempfile.TemporaryDirectory(prefix="ponente-shards-") as scratch:
        written = write(Path(scratch), options.shards, options.tokens)
        print(json.dumps({"measured": "write", "shards": options.shards, **written}), flush=True)
        for number in range(options.repeat):
            for which in ("ours", "tensorstore"):
                row = _cold(Path(scratch), which, options.seconds)
                load = os.getloadavg()[0]
                row = {"measured": "read", "reader": which, "process": number, "load": load, **row}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
