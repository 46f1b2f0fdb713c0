"""Freed memory stays with the process while a CPU trains.

XLA allocates a step's intermediates anew in every step. glibc maps large blocks and unmaps them
when they are freed, so the kernel clears every page again in the next step: a fifth of a small
model's step. Inside `kept` such blocks come from the heap, which is not given back.

Only the main heap can hold blocks of more than 64 MiB, and threads get heaps of their own, the
compiler's and XLA's among them. So `share_one_heap` comes before XLA has threads. In a process
that has had many threads already (a Ray worker) that is too late: there the environment variable
MALLOC_ARENA_MAX has to say so from the beginning, and `pipeline.execute.ray` sets it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

# Parameters of mallopt(3) with their defaults.
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX, ARENA_MAX = -1, -2, -4, -8
DEFAULTS = {TRIM_THRESHOLD: 128 * 1024, TOP_PAD: 128 * 1024, MMAP_MAX: 65_536}
KEEP = {TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 64 * 2**20, MMAP_MAX: 0}

VARIABLE = "MALLOC_ARENA_MAX"
ACCELERATORS = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*")
"""Device files of TPUs and NVIDIA GPUs."""


def share_one_heap(devices: Path = Path("/dev")) -> None:
    """Have threads that start from now on share the main heap, where only CPUs can compute.

    Call it before JAX is asked for a device. Hosts of accelerators keep a heap for each thread:
    their threads are many, and no step's intermediates are in them. Where MALLOC_ARENA_MAX is set
    that is the last word; 0, of which glibc takes no notice, leaves each thread its heap.
    """
    if VARIABLE in os.environ:
        return
    config: Any = jax.config
    there = any(any(devices.glob(pattern)) for pattern in ACCELERATORS)
    if there and config.jax_platforms != "cpu":
        return
    library = _glibc()
    if library is not None:
        library.mallopt(ARENA_MAX, 1)


@contextmanager
def kept(platform: str) -> Iterator[None]:
    """Keep freed memory until the end; nothing elsewhere than on CPUs with glibc."""
    library = _glibc() if platform == "cpu" else None
    if library is None:
        yield
        return
    _set(library, KEEP)
    try:
        yield
    finally:
        _set(library, DEFAULTS)
        library.malloc_trim(0)


def _set(library: ctypes.CDLL, settings: dict[int, int]) -> None:
    for parameter, value in settings.items():
        library.mallopt(parameter, value)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    needed = ("mallopt", "malloc_trim", "gnu_get_libc_version")
    found = all(hasattr(library, name) for name in needed)
    return library if found else None
