"""How random the order of training is, beside Levanter's permutation and true random ones.

    python -m tests.bench.shuffle_quality
    python -m tests.bench.shuffle_quality --levanter-python DIR/bin/python
    python -m tests.bench.shuffle_quality --keys 4         quickly

One JSON object a line. `batches`: distinct offsets in blocks per batch and the deviation of the
batches' share of odd rows, in the first window of so many rows, with the exact mean of a random
permutation beside. `battery`: over keys, the smallest p-value and Kolmogorov and Smirnov's p-value
of all of them being uniform, test by test (see `tests/data/batches/shuffle_statistics.py`). `tiny`:
whether all permutations of 2 to 5 elements are equally likely. `speed`: nanoseconds a position.

Systems: `order` is ours as training uses it, `permutation` what it is made of, `numpy` a random
permutation from a table, `levanter` the real one (only with --levanter-python) and
`levanter-formula` the same written anew.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from scipy import stats

from data.batches.block_shuffle import BlockShuffle
from data.batches.feistel import FeistelPermutation
from tests.data.batches import shuffle_statistics
from tests.data.batches.shuffle_statistics import (
    LISTED,
    battery,
    offsets_and_parity,
    offsets_of_random,
)

TABLE = [(65_536, 64, 1024, 128), (60_000, 64, 1024, 128), (131_072, 256, 512, 256)]
SIZES = [
    *[509, 997, 1023, 1024, 1025, 60_000, 65_521, 65_535, 65_536, 65_537],
    *[131_071, 131_072, 131_073, 10**12, 10**12 + 39, 2**40 - 1, 2**40 + 1],
]
SEEDS = range(3)
SPANS = (128, 4096)

Record = dict[str, Any]
Make = Callable[[int, int], shuffle_statistics.Permutation]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--levanter-python", type=Path, help="Python of an environment with it")
    parser.add_argument("--keys", type=int, default=20, help="of each size of the battery")
    options = parser.parse_args()
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    emit({"measure": "versions", **versions, "scipy": scipy.__version__})
    for records in (
        batches(),
        levanter(options.levanter_python),
        batteries(options.keys),
        tinies(),
        speed(),
    ):
        for record in records:
            emit(record)


def emit(record: Record) -> None:
    """Print one record."""
    print(json.dumps(record), flush=True)


def our_order(size: int, io_block_size: int, window_blocks: int, seed: int) -> BlockShuffle:
    """The order of a set of one window or less."""
    return BlockShuffle(
        sequences=size, io_block_size=io_block_size, window_blocks=window_blocks, seed=seed
    )


def our_permutation(size: int, seed: int) -> shuffle_statistics.Permutation:
    """The permutation of a window."""
    return FeistelPermutation(size, seed)


def numpys(size: int, seed: int) -> shuffle_statistics.Permutation:
    """A random permutation in a table."""
    table = np.random.default_rng(seed).permutation(size)
    return lambda positions: table[positions]


def batches() -> Iterator[Record]:
    """The table of offsets and parities, for what runs here."""
    for size, block, window, batch in TABLE:
        every = np.arange(size)
        rows = {
            "order": [our_order(size, block, window, seed).rows(every) for seed in SEEDS],
            "permutation": [our_permutation(size, seed)(every) for seed in SEEDS],
            "levanter-formula": [
                shuffle_statistics.shallow_feistel(size, seed)(every) for seed in SEEDS
            ],
            "numpy": [numpys(size, seed)(every) for seed in SEEDS],
        }
        for system, orders in rows.items():
            yield of_batches(system, orders, block, batch)


def of_batches(system: str, orders: list[np.ndarray], block: int, batch: int) -> Record:
    """One line of the table, over seeds."""
    size = len(orders[0])
    offsets, parities = zip(*(offsets_and_parity(o, batch, block) for o in orders), strict=True)
    return {
        "measure": "batches",
        "system": system,
        "rows": size,
        "block": block,
        "batch": batch,
        "distinct_offsets": [round(found, 2) for found in offsets],
        "distinct_offsets_of_random": round(offsets_of_random(size, batch, block)[0], 2),
        "parity_deviation": [round(found, 4) for found in parities],
        "parity_deviation_of_random": round(0.5 / math.sqrt(batch), 4),
    }


def levanter(python: Path | None) -> Iterator[Record]:
    """The same table and the speed of the real one, from its own environment."""
    if python is None:
        yield {"measure": "batches", "system": "levanter", "skipped": "give --levanter-python"}
        return
    calls = 200
    pairs = [(size, seed) for size, *_ in TABLE for seed in SEEDS]
    job = json.dumps({"permute": pairs, "time": SPANS, "calls": calls})
    script = Path(__file__).with_name("shuffle_levanter.py")
    ended = subprocess.run([python, script, job], stdout=subprocess.PIPE, check=True)
    head, _, raw = ended.stdout.partition(b"\n")
    about, orders = json.loads(head), np.frombuffer(raw, "<i8")
    for size, block, _, batch in TABLE:
        found, orders = orders[: size * len(SEEDS)], orders[size * len(SEEDS) :]
        table = list(found.reshape(len(SEEDS), size))
        for order in table:
            assert np.array_equal(np.sort(order), np.arange(size)), "not a permutation"
        yield of_batches("levanter", table, block, batch) | {"versions": about["versions"]}
    for span, times in about["seconds"].items():
        yield of_speed("levanter", "permutation of 65,536", int(span), times, calls)


def batteries(keys: int) -> Iterator[Record]:
    """P-values of each system at each size."""
    systems: dict[str, Make] = {
        "permutation": our_permutation,
        "numpy": numpys,
        "levanter-formula": shuffle_statistics.shallow_feistel,
    }
    for size in SIZES:
        for system, make in systems.items():
            if system == "numpy" and size > LISTED:
                continue  # no table of so many
            found = [battery(make(size, key), size, key) for key in range(keys)]
            names = list(found[0])
            values = {name: [each[name] for each in found] for name in names}
            yield {
                "measure": "battery",
                "system": system,
                "size": size,
                "keys": keys,
                "tests": len(names) * keys,
                "smallest": f"{min(min(v) for v in values.values()):.1e}",
                "smallest_by_test": {name: f"{min(v):.1e}" for name, v in values.items()},
                "uniform_by_test": {
                    name: f"{stats.kstest(v, 'uniform').pvalue:.1e}" for name, v in values.items()
                },
            }


def tinies() -> Iterator[Record]:
    """P-values of all permutations of a few elements being equally likely."""
    for size in (2, 3, 4, 5):
        keys = 60 * math.factorial(size)
        p_value = shuffle_statistics.tiny(lambda key, n=size: our_permutation(n, key), size, keys)
        yield {"measure": "tiny", "size": size, "keys": keys, "p_value": round(p_value, 4)}


def speed() -> Iterator[Record]:
    """Consecutive requests through new windows (tables are made), and the permutation alone."""
    calls = 400
    for span in SPANS:
        order, times = our_order(50_000_000, 64, 1024, 0), []
        for repeat in range(6):  # each on rows of its own
            starts = [(repeat * calls + call) * span for call in range(calls)]
            times.append(timed([(order.rows, np.arange(s, s + span)) for s in starts]))
        yield of_speed("order", "windows of 64 x 1024, in order", span, times[1:], calls)
        permutation, positions = our_permutation(65_536, 0), np.arange(span)
        times = [timed([(permutation, positions)] * calls) for _ in range(6)]
        yield of_speed("permutation", "permutation of 65,536", span, times[1:], calls)


def timed(calls: list[tuple[Callable[[np.ndarray], np.ndarray], np.ndarray]]) -> list[float]:
    """Wall and CPU seconds of the calls."""
    clock, cpu = time.perf_counter(), time.process_time()
    for function, positions in calls:
        function(positions)
    return [time.perf_counter() - clock, time.process_time() - cpu]


def of_speed(system: str, of: str, span: int, times: list[list[float]], calls: int) -> Record:
    """Nanoseconds a position, from (wall, CPU) seconds of repeated calls."""
    wall, cpu = ([each[i] / (calls * span) * 1e9 for each in times] for i in (0, 1))
    return {
        "measure": "speed",
        "system": system,
        "of": of,
        "span": span,
        "ns_per_position_min": round(min(wall), 1),
        "ns_per_position_median": round(statistics.median(wall), 1),
        "cpu_ns_per_position_median": round(statistics.median(cpu), 1),
    }


if __name__ == "__main__":
    main()
