"""Freed memory stays with the process while a CPU trains.

XLA allocates a step's intermediates anew in every step. glibc maps large blocks and unmaps them
when they are freed, so the kernel clears every page again in the next step: a fifth of a small
model's step. Inside `kept` such blocks come from the heap, which is not given back.

Only the heap of a process's first thread can hold blocks of more than 64 MiB: a step has to be
computed there, in the thread that calls it, and not in one of XLA's. Threads keep heaps of their
own, without which the compiler's wait for each other.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax

# Parameters of mallopt(3) with their defaults.
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
DEFAULTS = {TRIM_THRESHOLD: 128 * 1024, TOP_PAD: 128 * 1024, MMAP_MAX: 65_536}
KEEP = {TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 64 * 2**20, MMAP_MAX: 0}


def compute_in_calling_thread() -> None:
    """Have a CPU finish a step in the thread that calls it; other devices are not concerned.

    Call it before JAX is asked for a device, in the only process of a run: one of several that
    waits in a step for another is ahead of it, as on TPUs, where it has called the step already.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


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
