"""Measuring a source of batches: rates, processor time and bytes read. Standard library only.

Imported by this project's bench and, as a file beside them, by the scripts that run in the peers'
environments.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any


def emit(**record: Any) -> None:
    """One JSON line on stdout."""
    print(json.dumps(record), flush=True)


def versions(*names: str) -> dict[str, str]:
    """Installed versions of distributions."""
    return {name: version(name) for name in names}


def read_bytes() -> int:
    """Bytes that this process asked read calls for so far, from memory or disk; not mapped ones."""
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


def measure(
    make: Callable[[], Iterator[Any]],
    *,
    name: str,
    length: int,
    batch_size: int,
    seconds: float,
    repeat: int,
    stored_bytes: float | None,
    **more: Any,
) -> None:
    """Drain `make()` for `seconds`, `repeat` times, and print one line.

    Args:
        make: a new iterator of batches, endless; its set-up counts as the first batch's latency.
        stored_bytes: bytes a token has on disk; None where the data is mapped, so that reads cannot
            be counted.
    """
    rounds = [_round(make, length * batch_size, seconds) for _ in range(repeat)]
    wall = [tokens / elapsed for tokens, elapsed, *_ in rounds]
    processor = [tokens / worked for tokens, _, worked, *_ in rounds]
    read = [count / tokens for tokens, _, _, count, _ in rounds]
    record = {
        "name": name,
        "sequence_length": length,
        "batch_size": batch_size,
        "tokens_per_second": _best_and_median(wall),
        "tokens_per_cpu_second": _best_and_median(processor),
        "first_batch_ms": _least_and_median([1000 * first for *_, first in rounds]),
        "read_bytes_per_token": None,
        "read_over_used": None,
        "rounds": repeat,
        "load": round(os.getloadavg()[0], 1),
        **more,
    }
    if stored_bytes is not None:
        record["read_bytes_per_token"] = round(statistics.median(read), 3)
        record["read_over_used"] = round(statistics.median(read) / stored_bytes, 3)
    emit(**record)


def _round(
    make: Callable[[], Iterator[Any]], tokens: int, seconds: float
) -> tuple[int, float, float, int, float]:
    """Tokens, wall seconds, processor seconds, bytes read; and the first batch's latency."""
    began = time.perf_counter()
    batches = make()
    next(batches)
    first = time.perf_counter() - began
    _drain(batches, seconds / 4)
    read, worked, began = read_bytes(), time.process_time(), time.perf_counter()
    count = _drain(batches, seconds)
    elapsed, worked = time.perf_counter() - began, time.process_time() - worked
    read = read_bytes() - read
    if hasattr(batches, "close"):
        batches.close()
    return count * tokens, elapsed, worked, read, first


def _drain(batches: Iterator[Any], seconds: float) -> int:
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        next(batches)
        count += 1
    return count


def _best_and_median(rates: Sequence[float]) -> dict[str, int]:
    return {"best": round(max(rates)), "median": round(statistics.median(rates))}


def _least_and_median(times: Sequence[float]) -> dict[str, float]:
    return {"min": round(min(times), 2), "median": round(statistics.median(times), 2)}
