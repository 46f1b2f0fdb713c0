"""Clocks, values and files of the checkpoint bench."""

from __future__ import annotations

import ctypes
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np


def values(shapes: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    """Arrays by name, of {name: [shape, dtype]}: bits that no store can make smaller."""
    block = np.random.default_rng(0).standard_normal(1 << 22, np.float32)
    return {
        name: np.resize(block, math.prod(shape)).reshape(shape).astype(dtype)
        for name, (shape, dtype) in shapes.items()
    }


class Clock:
    """Wall and processor seconds (all threads of this process) since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def wall(self) -> float:
        """Wall seconds."""
        return time.perf_counter() - self._wall

    def cpu(self) -> float:
        """Processor seconds."""
        return time.process_time() - self._cpu


def rounds(name: str, figures: list[float], scale: float = 1.0, digits: int = 3) -> dict[str, Any]:
    """Fields for the least and the median of some figures."""
    return {
        f"{name}_min": round(min(figures) * scale, digits),
        f"{name}_median": round(statistics.median(figures) * scale, digits),
    }


def files(directory: str | Path) -> list[Path]:
    """Every file below a directory."""
    return [path for path in Path(directory).rglob("*") if path.is_file()]


def forget(directory: str | Path) -> None:
    """Put what was written on the disk, and out of the page cache."""
    for path in files(directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def settle() -> None:
    """Return freed memory and flush disks, so that one measurement does not pay for another."""
    ctypes.CDLL(None).malloc_trim(0)
    os.sync()


def peak_rss_mib() -> float:
    """Most memory that this process has had."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return round(int(line.split()[1]) / 1024)


def versions(*names: str) -> dict[str, str]:
    """Of installed distributions."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def copied(targets: list[np.ndarray], sources: list[np.ndarray], threads: int) -> float:
    """Seconds to copy arrays from memory to memory that was used before, 8 MiB at a time."""
    pieces = []
    for target, source in zip(targets, sources, strict=True):
        flat, into, step = source.reshape(-1), target.reshape(-1), (8 << 20) // source.itemsize
        for begin in range(0, flat.size, step):
            pieces.append((into[begin : begin + step], flat[begin : begin + step]))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda piece: np.copyto(*piece), pieces))  # the pool's threads, and memory
        clock = Clock()
        list(pool.map(lambda piece: np.copyto(*piece), pieces))
        return clock.wall()


def measure(
    name: str,
    save: Callable[[int], Callable[[], None]],
    restore: Callable[[int], Any],
    directory: Callable[[int], str],
    arrays: list[np.ndarray],
    repeat: int,
    **more: Any,
) -> dict[str, Any]:
    """One line: saves one after the other, then the last restored from the disk and from memory.

    Args:
        name: of the system.
        save: begins to save step n and gives a function that waits until it is stored.
        restore: step n, with every array on its device.
        directory: of the checkpoint of step n.
        arrays: what is saved, in host memory: copied just before every save, as the limit.
        repeat: saves that count, after a first one that is told apart.
        more: fields of the line.
    """
    blocking, background, cpu, copies = [], [], [], []
    copy = [np.zeros_like(array) for array in arrays]
    for step in range(1, repeat + 2):
        settle()
        copies.append(copied(copy, arrays, os.cpu_count() or 1))
        clock = Clock()
        wait = save(step)
        blocking.append(clock.wall())
        wait()
        background.append(clock.wall() - blocking[-1])
        cpu.append(clock.cpu())
    saved = files(directory(repeat + 1))
    cold, warm = [], []
    for _ in range(repeat):
        forget(directory(repeat + 1))
        for figures in (cold, warm):
            clock = Clock()
            found = restore(repeat + 1)
            figures.append(clock.wall())
            del found
    return {
        "measure": name,
        "first_blocking_s": round(blocking[0], 3),
        **rounds("blocking_s", blocking[1:]),
        **rounds("copy_s", copies[1:]),
        **rounds("background_s", background[1:]),
        **rounds("cpu_s", cpu[1:]),
        **rounds("restore_cold_s", cold),
        **rounds("restore_warm_s", warm),
        "files": len(saved),
        "stored_mib": round(sum(path.stat().st_size for path in saved) / 2**20),
        "peak_rss_mib": peak_rss_mib(),
        **more,
    }


def emit(line: dict[str, Any]) -> None:
    """One JSON line on stdout."""
    print(json.dumps(line), flush=True)
