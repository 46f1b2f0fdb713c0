"""Our loader: rates, latency, where the time goes, and bytes read.

    python -m tests.bench.loading --corpus DIR
    python -m tests.bench.loading --corpus DIR --synthetic 1000000000 --work DIR   a larger set

`--corpus` has Parquet files with a column `text`, and a tokenizer.json. It is tokenised once into
`--work` (a temporary directory by default), as our cache and as one bare file of uint16.

One JSON object a measurement. One consumer takes batches and does nothing with them; everything is
in the page cache after the first round. Rates are tokens per wall second and per processor second
(all threads of the process), best and median of the rounds. `read_over_used` is the bytes that read
calls asked for over the bytes that the tokens take on disk; it cannot be known for mapped files.
`window` lines read one epoch each, for shuffles from none to all, opening the shards included.
"""

from __future__ import annotations

import argparse
import os
import random
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
    """The loader with its defaults; then with other numbers of threads."""

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
                    lambda at, dataset=dataset, rows=rows, count=count: dataset._rows.read(
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


def main() -> None:
    """Prepare, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--synthetic", type=int, default=0, help="random tokens instead")
    parser.add_argument("--work", type=Path, default=None, help="kept and used again")
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
        for part in (ours, parts, windows, mapped):
            part(work, options)


if __name__ == "__main__":
    main()
