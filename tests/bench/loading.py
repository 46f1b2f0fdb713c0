"""Our loader: rates, latency, where the time goes, and bytes read.

    python -m tests.bench.loading --corpus DIR
    python -m tests.bench.loading --corpus DIR --synthetic 1000000000 --work DIR   a larger set

`--corpus` has Parquet files with a column `text`, and a tokenizer.json. It is tokenised once into
`--work` (a temporary directory by default).

One JSON object a measurement. One consumer takes batches and does nothing with them; everything is
in the page cache after the first round. Rates are tokens per wall second and per processor second
(all threads of the process), best and median of the rounds. `read_over_used` is the bytes that read
calls asked for over the bytes that the tokens take on disk. `window` lines read one epoch each, for
shuffles from none to all, opening the shards included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.batches.dataset import Dataset, DatasetSpec
from data.batches.loader import GROUP_TOKENS, Loader
from tests.bench.loading_tokens import mixture, prepare, spec

_ALL = 1 << 40  # blocks of a window that holds any set
SHUFFLES = {"block 64x1024": (64, 1024), "block 256x512": (256, 512), "full": (1, _ALL)}
WINDOWS = [(1, 1), (8, 1), (8, 8), (64, 16), (64, 1024), (256, 512), (1, _ALL)]
_UNALIGNED = 1500  # a length that is no multiple of the cache's chunks


def emit(**record: Any) -> None:
    """One JSON line on stdout."""
    print(json.dumps(record), flush=True)


def rates(work: Path, options: argparse.Namespace) -> None:
    """The loader with its defaults; a mixture; then other numbers of threads."""
    length = options.lengths[0]
    for each in options.lengths:
        for name, shuffle in SHUFFLES.items():
            _rate(f"ponente {name}", spec(work, each, *shuffle), options)
    _rate("ponente mixture of two, block 64x1024", mixture(work, length), options)
    for threads in (1, 2, 4):
        name = f"ponente block 64x1024, {threads} threads"
        _rate(name, spec(work, length, 64, 1024), options, threads=threads)


def _rate(name: str, made: DatasetSpec, options: argparse.Namespace, **more: Any) -> None:
    """Take batches for some seconds, some rounds, each with a new loader."""
    tokens = made.sequence_length * options.batch
    found = []
    for _ in range(options.repeat):
        began = time.perf_counter()
        with Dataset(made) as dataset, Loader(dataset, batch_size=options.batch, **more) as batches:
            next(batches)
            first = time.perf_counter() - began
            _drain(batches, options.seconds / 4)
            read, worked, began = _read_bytes(), time.process_time(), time.perf_counter()
            count = tokens * _drain(batches, options.seconds)
            elapsed, worked = time.perf_counter() - began, time.process_time() - worked
            found.append((count / elapsed, count / worked, first, (_read_bytes() - read) / count))
    wall, processor, first, read = zip(*found, strict=True)
    emit(
        name=name,
        sequence_length=made.sequence_length,
        batch_size=options.batch,
        tokens_per_second=_best_and_median(wall),
        tokens_per_cpu_second=_best_and_median(processor),
        first_batch_ms=round(1000 * statistics.median(first), 2),
        read_over_used=round(statistics.median(read) / 2, 3),
        load=round(os.getloadavg()[0], 1),
    )


def _drain(batches: Loader, seconds: float) -> int:
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        next(batches)
        count += 1
    return count


def _best_and_median(rates: Sequence[float]) -> dict[str, int]:
    return {"best": round(max(rates)), "median": round(statistics.median(rates))}


def _read_bytes() -> int:
    """Bytes that this process asked read calls for so far, from memory or disk."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def parts(work: Path, options: argparse.Namespace) -> None:
    """Where the time goes: the order alone, and reading rows alone, by rows in a call."""
    for length in options.lengths:
        with Dataset(spec(work, length, 64, 1024)) as dataset:
            for count in (16, 1024, 1 << 14):
                took = _processor_seconds(dataset.rows, count)
                name = f"ponente part: order of {count} positions"
                emit(name=name, ns_per_position=round(1e9 * took / count), sequence_length=length)
            for count in (options.batch, GROUP_TOKENS // length):
                took = _processor_seconds(_reader(dataset), count)
                emit(
                    name=f"ponente part: reading {count} rows",
                    tokens_per_cpu_second=round(count * length / took),
                    sequence_length=length,
                )


def _reader(dataset: Dataset) -> Callable[[np.ndarray], Any]:
    rows = dataset.rows(np.arange(1 << 14))
    return lambda positions: dataset._rows.read(rows.take(positions, mode="wrap"))


def _processor_seconds(call: Callable[[np.ndarray], Any], count: int) -> float:
    """Median processor seconds of calls with the next `count` positions, for half a second."""
    took, positions, end = [], np.arange(count), time.perf_counter() + 0.5
    while time.perf_counter() < end or len(took) < 5:
        began = time.process_time()
        call(positions)
        took.append(time.process_time() - began)
        positions = positions + count
    return float(np.median(took))


def windows(work: Path, options: argparse.Namespace) -> None:
    """Bytes read over bytes used in one epoch, whatever the shuffle."""
    for length in [*options.lengths, _UNALIGNED]:
        for io_block_size, window_blocks in WINDOWS:
            before = _read_bytes()
            with Dataset(spec(work, length, io_block_size, window_blocks)) as dataset:
                count = dataset.sequences // options.batch
                with Loader(dataset, batch_size=options.batch, stop_batch=count) as loader:
                    used = sum(2 * batch.size for batch in loader)
                rows = dataset.sequences
            emit(
                name="ponente window",
                sequence_length=length,
                io_block_size=io_block_size,
                window_rows=min(io_block_size * window_blocks, rows),
                rows=rows,
                bytes_used=used,
                read_over_used=round((_read_bytes() - before) / used, 4),
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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = options.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        tokens = prepare(work, options.corpus, options.synthetic)
        emit(name="tokens", tokens=tokens, cores=os.cpu_count(), python=sys.version.split()[0])
        for part in (rates, parts, windows):
            part(work, options)


if __name__ == "__main__":
    main()
