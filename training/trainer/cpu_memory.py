"""Keeps freed memory in the process while it trains on CPUs.

XLA allocates a step's intermediates again in every step. glibc maps large blocks and unmaps them
when they are freed, so the kernel zeroes every page again in the next step: a tenth of a small
model's step. Inside `kept`, such blocks come from the heap, which glibc does not return.

Only the main thread's heap holds blocks of more than 64 MiB, so a step must be computed in the
thread that calls it (`training.sharding.distributed.joined`) and not in one of XLA's. Other threads
keep heaps of their own: the compiler's would wait for each other in one.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of mallopt(3).
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
DEFAULTS = {TRIM_THRESHOLD: 128 * 1024, TOP_PAD: 128 * 1024, MMAP_MAX: 65_536}
KEEP = {TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 64 * 2**20, MMAP_MAX: 0}


@contextmanager
def kept(platform: str) -> Iterator[None]:
    """Keep freed memory until the context exits; does nothing except on CPUs with glibc."""
    library = ctypes.CDLL(None) if platform == "cpu" and sys.platform == "linux" else None
    if library is None or not hasattr(library, "gnu_get_libc_version"):
        yield
        return
    for parameter, value in KEEP.items():
        library.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, value in DEFAULTS.items():
            library.mallopt(parameter, value)
        library.malloc_trim(0)
