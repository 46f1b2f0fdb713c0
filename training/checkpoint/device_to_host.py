"""Copies the state from devices to host memory, the part of a save that blocks training.

Every distinct shard is copied from one of the devices that hold it, chosen so that all devices of
all processes copy about the same number of bytes. All transfers start before the first wait.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from training.checkpoint.chunk_grid import Box, box_of, shape_of

_PIECE_BYTES = 8 << 20  # size of one task of the copy threads
_THREADS = min(8, os.cpu_count() or 1)
_PAGE_BYTES = 4096


@dataclass(frozen=True, eq=False)
class HostShard:
    """One shard of an array in host memory; only `HostCopies` writes to it."""

    name: str
    box: Box
    values: np.ndarray


class HostCopies:
    """Copies the shards that this process writes; on CPUs every save reuses the same memory."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Box], np.ndarray] = {}
        self._reserving: threading.Thread | None = None

    def reserve(self, arrays: Mapping[str, jax.Array]) -> None:
        """Start to allocate the memory that `take` copies such arrays into, in a background thread.

        The kernel allocates a page at the first write to it, which would slow down the first save.
        """
        self._reserved()
        missing = [one for one in _mine(arrays) if one[:2] not in self._kept]
        fresh = [self._target(name, box, data) for name, box, data in missing if _on_host(data)]
        if fresh:
            self._reserving = threading.Thread(
                target=_touch, args=(fresh,), name="checkpoint-reserve", daemon=True
            )
            self._reserving.start()

    def _reserved(self) -> None:
        """Wait for the thread of `reserve`."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def take(self, arrays: Mapping[str, jax.Array]) -> list[HostShard]:
        """Copies of this process's shards; the arrays may be donated when this returns.

        Overwrites the values of an earlier call. Blocks until the arrays are computed.
        """
        self._reserved()
        mine = _mine(arrays)
        for _, _, data in mine:
            if not _on_host(data):
                data.copy_to_host_async()
        shards, pairs = [], []
        for name, box, data in mine:
            # A view of a CPU's array, which must be copied, or the finished copy of a device's.
            values = np.asarray(data)
            if _on_host(data):
                target = self._target(name, box, values)
                pairs.append((target, values))
                values = target
            shards.append(HostShard(name, box, values))
        _copy(pairs)
        return shards

    def _target(self, name: str, box: Box, values: np.ndarray | jax.Array) -> np.ndarray:
        kept = self._kept.get((name, box))
        if kept is None or kept.shape != values.shape or kept.dtype != values.dtype:
            # Page faults of new memory cost more than the copy, so the next save reuses it.
            kept = self._kept[name, box] = np.empty(values.shape, values.dtype)
        return kept


@functools.lru_cache(maxsize=4)
def assigned(
    arrays: tuple[tuple[str, tuple[int, ...], int, jax.sharding.Sharding], ...],
) -> dict[tuple[str, Box], int]:
    """The id of the device that each shard is copied from, the same result in every process.

    Takes name, shape, itemsize and sharding of each array; gives device ids by (name, box).
    """
    holders: dict[tuple[str, Box], list[int]] = {}
    sizes: dict[tuple[str, Box], int] = {}
    for name, shape, itemsize, sharding in arrays:
        for device, index in sharding.devices_indices_map(shape).items():
            box = box_of(index, shape)
            holders.setdefault((name, box), []).append(device.id)
            sizes[name, box] = math.prod(shape_of(box)) * itemsize
    # Greedy balancing: the largest shards first, each to its least loaded holder.
    load: Counter[int] = Counter()
    writers = {}
    for shard in sorted(holders, key=lambda shard: (-sizes[shard], shard)):
        writer = min(holders[shard], key=lambda device: (load[device], device))
        load[writer] += max(1, sizes[shard])
        writers[shard] = writer
    return writers


def _mine(arrays: Mapping[str, jax.Array]) -> list[tuple[str, Box, jax.Array]]:
    """Name, box and one device's values of each shard that this process writes."""
    writers = assigned(
        tuple((name, x.shape, x.dtype.itemsize, x.sharding) for name, x in arrays.items())
    )
    return [
        (name, box, shard.data)
        for name, array in arrays.items()
        for shard in array.addressable_shards
        if writers[name, box := box_of(shard.index, array.shape)] == shard.device.id
    ]


def _touch(arrays: list[np.ndarray]) -> None:
    """Write to every page of uninitialised arrays, so that the kernel allocates them."""
    for array in arrays:
        array.reshape(-1).view(np.uint8)[::_PAGE_BYTES] = 0


def _on_host(data: jax.Array) -> bool:
    """Whether `np.asarray` gives a view of the array's own memory."""
    device = next(iter(data.devices()))
    return device.platform == "cpu" or "host" in (data.sharding.memory_kind or "")


def _copy(pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Copy each (target, source) pair; several threads share the pieces of large arrays."""
    pieces = []
    for target, source in pairs:
        if not source.flags.c_contiguous or source.nbytes <= _PIECE_BYTES:
            pieces.append((target, source))
            continue
        flat, target = source.reshape(-1), target.reshape(-1)
        step = _PIECE_BYTES // source.itemsize
        for begin in range(0, flat.size, step):
            pieces.append((target[begin : begin + step], flat[begin : begin + step]))
    if len(pieces) == len(pairs) or _THREADS == 1:
        for target, source in pieces:
            np.copyto(target, source)
        return
    with ThreadPoolExecutor(_THREADS, "checkpoint-copy") as pool:
        list(pool.map(lambda piece: np.copyto(*piece), pieces))
