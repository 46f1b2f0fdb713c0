"""Levanter's own permutation, run in its environment: `python shuffle_levanter.py JOB`.

JOB is a JSON object: "permute" lists (size, seed) pairs, "time" lists spans. On stdout come one
JSON line with versions and times, then every permutation of "permute" as raw little-endian int64.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from levanter.data._prp import FeistelPermutation


def main() -> None:
    """Do the job that the first argument describes."""
    job = json.loads(sys.argv[1])
    out = sys.stdout.buffer
    names = ("marin-levanter", "levanter", "jax", "numpy")
    times = {str(span): seconds(span, job["calls"]) for span in job["time"]}
    out.write(json.dumps({"versions": versions(names), "seconds": times}).encode() + b"\n")
    for size, seed in job["permute"]:
        permutation = FeistelPermutation(size, jax.random.PRNGKey(seed))
        out.write(permutation(np.arange(size)).astype("<i8").tobytes())


def seconds(span: int, calls: int) -> list[list[float]]:
    """Wall and CPU seconds of so many calls for consecutive positions, five times."""
    size = 65_536
    permutation = FeistelPermutation(size, jax.random.PRNGKey(0))
    found = []
    for _ in range(6):
        clock, cpu = time.perf_counter(), time.process_time()
        for call in range(calls):
            start = call * span % (size - span)
            permutation(np.arange(start, start + span))
        found.append([time.perf_counter() - clock, time.process_time() - cpu])
    return found[1:]


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """Versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
