"""Our loader beside other readers of the same tokens: rates, latency, and bytes read.

    python -m tests.bench.loading --corpus DIR [--peers-python PATH] [--levanter-python PATH]
    python -m tests.bench.loading --corpus DIR --synthetic 1000000000 --work DIR   a larger set

`--corpus` has Parquet files with a column `text`, and a tokenizer.json. It is tokenised once into
`--work` (a temporary directory by default), as our cache and as one bare file of uint16, from which
the peers make their files. `--peers-python` is of an environment with datatrove, torch, datasets,
grain and array-record, `--levanter-python` of one with marin-levanter; what is missing is said.

One JSON object a measurement. One consumer takes batches and does nothing with them; everything is
in the page cache after the first round. Rates are tokens per wall second and per processor second
(all threads of the process), best and median of the rounds. `read_over_used` is the bytes that read
calls asked for over the bytes that the tokens take on disk; it cannot be known for mapped files.
`window` lines read one epoch each, for shuffles from none to all, opening the shards included.
`exit` lines are the seconds a process takes to end while each of eight threads reads for 20 s, with
the loader's threads and with those of a ThreadPoolExecutor.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data.batches.dataset import Dataset
from data.batches.loader import GROUP_TOKENS, Loader
from tests.bench.loading_measure import emit, measure, read_bytes, versions
from tests.bench.loading_tokens import mixture, prepare, spec

_ALL = 1 << 40  # blocks of a window that holds any set
SHUFFLES = {"block 64x1024": (64, 1024), "block 256x512": (256, 512), "full": (1, _ALL)}
WINDOWS = [(1, 1), (8, 1), (8, 8), (64, 16), (64, 1024), (256, 512), (1, _ALL)]
_UNALIGNED = 1500  # a length that is no multiple of the cache's chunks


def ours(work: Path, options: dict[str, Any]) -> None:
    """The loader with its defaults; then with other numbers of threads, and under Grain."""

    def make(length: int, shuffle: tuple[int, int], **more: Any) -> Loader:
        dataset = Dataset(spec(work, length, *shuffle))
        return Loader(dataset, batch_size=options["batch_size"], **more)

    settings = {**options, "stored_bytes": 2, "versions": versions("numpy")}
    lengths = settings.pop("lengths")
    for length in lengths:
        for name, shuffle in SHUFFLES.items():
            measure(
                lambda length=length, shuffle=shuffle: make(length, shuffle),
                name=f"ponente {name}",
                length=length,
                **settings,
            )
    measure(
        lambda: Loader(Dataset(mixture(work, lengths[0])), batch_size=options["batch_size"]),
        name="ponente mixture of two, block 64x1024",
        length=lengths[0],
        **settings,
    )
    for threads in (1, 2, 4):
        measure(
            lambda threads=threads: make(lengths[0], (64, 1024), threads=threads),
            name=f"ponente block 64x1024, {threads} threads",
            length=lengths[0],
            **settings,
        )


def parts(work: Path, options: dict[str, Any]) -> None:
    """Where the time goes: the order alone, and reading rows alone, by rows in a call."""
    for length in options["lengths"]:
        with Dataset(spec(work, length, 64, 1024)) as dataset:
            rows = dataset.rows(np.arange(1 << 14))
            for positions in (16, 1024, 1 << 14):
                took = _processor_seconds(
                    lambda at, dataset=dataset, count=positions: dataset.rows(
                        np.arange(at * count, (at + 1) * count)
                    )
                )
                emit(
                    name=f"ponente part: order of {positions} positions",
                    ns_per_position=round(1e9 * took / positions),
                    ns_per_token=round(1e9 * took / positions / length, 3),
                    sequence_length=length,
                )
            for count in (options["batch_size"], GROUP_TOKENS // length):
                took = _processor_seconds(
                    lambda at, dataset=dataset, rows=rows, count=count: dataset.read_rows(
                        rows.take(np.arange(at * count, (at + 1) * count), mode="wrap")
                    )
                )
                emit(
                    name=f"ponente part: reading {count} rows",
                    tokens_per_cpu_second=round(count * length / took),
                    ns_per_token=round(1e9 * took / count / length, 3),
                    sequence_length=length,
                )


def _processor_seconds(call: Any, seconds: float = 0.5) -> float:
    """Median processor seconds of `call(0)`, `call(1)`, ..."""
    took, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(took) < 5:
        began = time.process_time()
        call(len(took))
        took.append(time.process_time() - began)
    return float(np.median(took))


def windows(work: Path, options: dict[str, Any]) -> None:
    """Bytes read over bytes used in one epoch, whatever the shuffle."""
    for length in [*options["lengths"], _UNALIGNED]:
        for io_block_size, window_blocks in WINDOWS:
            before, used = read_bytes(), 0
            with Dataset(spec(work, length, io_block_size, window_blocks)) as dataset:
                count = dataset.sequences // options["batch_size"]
                batch_size = options["batch_size"]
                with Loader(dataset, batch_size=batch_size, stop_batch=count) as loader:
                    used = sum(2 * batch.size for batch in loader)
                rows = dataset.sequences
            emit(
                name="ponente window",
                sequence_length=length,
                io_block_size=io_block_size,
                window_rows=min(io_block_size * window_blocks, rows),
                rows=rows,
                bytes_used=used,
                read_over_used=round((read_bytes() - before) / used, 4),
            )


def mapped(work: Path, options: dict[str, Any]) -> None:
    """np.memmap of the bare file: what the machine can do without checks, shards or an order."""
    settings = {**options, "stored_bytes": None, "versions": versions("numpy")}
    batch_size = options["batch_size"]

    def make(length: int, block: int) -> Iterator[np.ndarray]:
        tokens = np.memmap(work / "tokens.bin", dtype=np.uint16, mode="r")
        rows = tokens[: len(tokens) // length * length].reshape(-1, length)
        chance, count = random.Random(0), len(rows)
        while True:
            blocks = list(range(-(-count // block)))
            chance.shuffle(blocks)
            order = (np.array(blocks)[:, None] * block + np.arange(block)).reshape(-1)
            order = order[order < count]
            for begin in range(0, count - batch_size, batch_size):
                yield rows[order[begin : begin + batch_size]].astype(np.int32)

    for length in settings.pop("lengths"):
        for name, block in (("random rows", 1), ("blocks of 64", 64)):
            measure(
                lambda length=length, block=block: make(length, block),
                name=f"np.memmap {name}",
                length=length,
                **settings,
            )


_LOADER = """
import time
from data.batches import loader
loader._CLOSE_SECONDS = 0.1
class Hanging:
    sequence_length, sequences, is_local = 8, 100, True
    def read(self, positions):
        time.sleep(20)
with loader.Loader(Hanging(), batch_size=4):
    time.sleep(0.2)
print(time.time(), flush=True)
"""
_EXECUTOR = """
import time
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(8)
reads = [pool.submit(time.sleep, 20) for _ in range(8)]
time.sleep(0.2)
pool.shutdown(wait=False, cancel_futures=True)
print(time.time(), flush=True)
"""


def exits(work: Path, options: dict[str, Any]) -> None:
    """Seconds from the last line of a program to its end, while its reads hang."""
    del work, options
    for name, program in (("loader", _LOADER), ("ThreadPoolExecutor", _EXECUTOR)):
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True
        )
        emit(name=f"exit, {name}", seconds=round(time.time() - float(done.stdout), 2))


def elsewhere(python: Path | None, script: str, work: Path, options: dict[str, Any]) -> None:
    """Run a script of this directory in another environment; its lines are printed as they come."""
    if python is None:
        emit(name=script, skipped="no interpreter was given for it")
        return
    path = Path(__file__).with_name(script)
    done = subprocess.run(
        [str(python), str(path), str(work), json.dumps(options)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        emit(name=script, failed=done.stderr.strip().splitlines()[-3:])


def main() -> None:
    """Prepare, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--synthetic", type=int, default=0, help="random tokens instead")
    parser.add_argument("--work", type=Path, default=None, help="kept and used again")
    parser.add_argument("--peers-python", type=Path, default=None)
    parser.add_argument("--levanter-python", type=Path, default=None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of a measurement")
    args = parser.parse_args()
    options = {
        "lengths": args.lengths,
        "batch_size": args.batch,
        "seconds": args.seconds,
        "repeat": args.repeat,
    }
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        prepare(work, args.corpus, args.synthetic)
        tokens = (work / "tokens.bin").stat().st_size // 2
        emit(name="tokens", tokens=tokens, cores=os.cpu_count(), python=sys.version.split()[0])
        for part in (ours, parts, windows, mapped, exits):
            part(work, options)
        elsewhere(args.peers_python, "loading_peers.py", work, options)
        levanter = {**options, "tokenizer": str(args.corpus), "cache_bytes": None}
        elsewhere(args.levanter_python, "loading_levanter.py", work, levanter)
        if args.levanter_python:
            # As with a set ten times larger than its cache of chunks (int32).
            small = {**levanter, "lengths": args.lengths[:1], "cache_bytes": 4 * tokens // 10}
            elsewhere(args.levanter_python, "loading_levanter.py", work, small)


if __name__ == "__main__":
    main()
