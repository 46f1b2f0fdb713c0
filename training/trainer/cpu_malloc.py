"""Keeps freed memory in the process while it trains on CPUs.

XLA allocates a step's intermediates again in every step. glibc maps large blocks and unmaps them
when they are freed, so the kernel zeroes every page again in the next step: a fifth of a small
model's step time. Inside `kept`, such blocks come from the heap, and glibc does not return it to
the kernel.

Only the heap of the main thread can hold blocks of more than 64 MiB, so a step must be computed in
that thread, which calls it, and not in one of XLA's. Other threads keep arenas of their own:
sharing one would make the compiler's threads wait for each other.
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
    """Make a CPU compute a step in the thread that calls it; no effect on other devices.

    Call it before JAX initializes its devices, and only where the run has one process. With several
    processes dispatch stays asynchronous, as on TPUs: a process that waits in a step for another
    has then called more steps than that one, and the watchdog sees which process is behind.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


@contextmanager
def kept(platform: str) -> Iterator[None]:
    """Keep freed memory until the context exits; does nothing except on CPUs with glibc."""
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
