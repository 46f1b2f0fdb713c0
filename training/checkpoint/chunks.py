"""Writes arrays as chunks and reads them back, with checksums that detect corruption."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import google_crc32c
import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pipeline.errors import InputError
from training.checkpoint.chunk_grid import (
    CRC_BYTES,
    Box,
    ChunkGrid,
    box_of,
    chunk_file,
    common,
    shape_of,
    within,
)
from training.checkpoint.device_to_host import HostShard
from training.checkpoint.files import Files, WrittenChunks, in_parallel

_AHEAD_BYTES = 512 << 20  # host memory of a restore: values read and not yet on a device
_STRIDE = 1 << 20  # bytes per call of `extend`, which holds the GIL


def checksum(data: np.ndarray) -> int:
    """CRC-32C of a contiguous uint8 array."""
    found = 0
    for begin in range(0, data.nbytes, _STRIDE):
        found = google_crc32c.extend(found, data[begin : begin + _STRIDE])  # type: ignore[bad-argument-type]
    return found


def write_chunks(
    files: Files, shards: Iterable[HostShard], leaves: Mapping[str, dict[str, Any]]
) -> WrittenChunks:
    """Write the chunks of this process's shards of the arrays `leaves`; returns their digests.

    Raises:
        InputError: a parameter or moment (an array with named axes) is not finite.
    """
    tasks = []
    for shard in shards:
        entry = leaves[shard.name]
        grid, named = ChunkGrid.of(entry), entry["axes"] is not None
        tasks += [(shard, grid, index, named) for index in grid.overlapping(shard.box)]

    def write(task: tuple[HostShard, ChunkGrid, tuple[int, ...], bool]) -> tuple[int, str]:
        shard, grid, index, named = task
        values = np.ascontiguousarray(shard.values[within(grid.box(index), shard.box)])
        if named:
            _check_finite(shard.name, values)
        data = _bytes(values)
        crc = checksum(data)
        tail = crc.to_bytes(CRC_BYTES, "little")
        digest = hashlib.sha256(data.data)
        digest.update(tail)
        files.write(chunk_file(shard.name, index), data.data, tail)
        return crc, digest.hexdigest()

    written = WrittenChunks()
    results = in_parallel(write, tasks, files.threads)
    for (shard, grid, index, _), result in zip(tasks, results, strict=True):
        written.chunks.setdefault(shard.name, {})[grid.number(index)] = result
    return written


@dataclass(frozen=True, eq=False)
class _DeviceBox:
    """A box of an array that devices of this process hold."""

    box: Box
    values: np.ndarray
    devices: list[jax.Device]


def read_arrays(
    files: Files, leaves: Mapping[str, Any], target: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Arrays of a checkpoint with the shardings of `target`, shapes and dtypes as in the index.

    A process reads each chunk that its devices need once, and no other chunk. Host memory holds a
    few arrays at a time. `leaves` are those of the index, `target` has `jax.ShapeDtypeStruct` with
    a sharding, by name.

    Raises:
        CorruptOutput: a chunk is missing or changed.
    """
    arrays: dict[str, jax.Array] = {}
    with ThreadPoolExecutor(files.threads, "restore") as pool:
        in_flight: deque[tuple[str, list[_DeviceBox], list[Future[None]]]] = deque()
        ahead = 0

        def finish() -> int:
            name, boxes, futures = in_flight.popleft()
            for future in futures:
                future.result()
            arrays[name] = _placed(target[name], boxes)
            return sum(own.values.nbytes for own in boxes)

        try:
            for name, want in target.items():
                grid, boxes = ChunkGrid.of(leaves[name]), _device_boxes(want)
                needed: dict[tuple[int, ...], list[_DeviceBox]] = {}
                for own in boxes:
                    for index in grid.overlapping(own.box):
                        needed.setdefault(index, []).append(own)
                checksums = leaves[name]["crc32c"]
                futures = [
                    pool.submit(_fill, files, name, checksums, grid, *item)
                    for item in needed.items()
                ]
                in_flight.append((name, boxes, futures))
                ahead += sum(own.values.nbytes for own in boxes)
                while ahead > _AHEAD_BYTES and len(in_flight) > 1:
                    ahead -= finish()
            while in_flight:
                finish()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return arrays


def read_box(files: Files, name: str, entry: Mapping[str, Any], box: Box) -> np.ndarray:
    """The values of one box of an array, in host memory; errors as of `read_arrays`."""
    grid = ChunkGrid.of(entry)
    own = _DeviceBox(box, np.empty(shape_of(box), entry["dtype"]), [])
    in_parallel(
        lambda index: _fill(files, name, entry["crc32c"], grid, index, [own]),
        grid.overlapping(box),
        files.threads,
    )
    return own.values


def _fill(
    files: Files,
    name: str,
    checksums: list[int],
    grid: ChunkGrid,
    index: tuple[int, ...],
    boxes: list[_DeviceBox],
) -> None:
    """Read one chunk, verify its checksums and copy it into the boxes that it overlaps."""
    box = grid.box(index)
    values = _read_buffer(box, boxes)
    data, tail = _bytes(values), np.empty(CRC_BYTES, np.uint8)
    file = chunk_file(name, index)
    files.read(file, data, tail)
    found = checksum(data)
    # The CRC stored in the chunk (Zarr's codec) detects corruption; the index's CRC also detects
    # a chunk that was replaced by a valid chunk of other values.
    if int.from_bytes(tail.tobytes(), "little") != found or checksums[grid.number(index)] != found:
        raise files.corrupt(file, "content that does not match its CRC-32C")
    for own in boxes:
        shared = common(box, own.box)
        target = own.values[within(shared, own.box)]
        if not np.may_share_memory(target, values):
            target[...] = values[within(shared, box)]


def _read_buffer(box: Box, boxes: list[_DeviceBox]) -> np.ndarray:
    """A buffer for a chunk: a view of the one box that has all of it, else new memory."""
    own = boxes[0]
    if len(boxes) == 1 and common(box, own.box) == box:
        place = own.values[within(box, own.box)]
        if place.flags.c_contiguous:
            return place
    return np.empty(shape_of(box), own.values.dtype)


def _device_boxes(want: Any) -> list[_DeviceBox]:
    """The distinct boxes that this process's devices hold, with uninitialised values."""
    devices: dict[Box, list[jax.Device]] = {}
    for device, index in want.sharding.addressable_devices_indices_map(want.shape).items():
        devices.setdefault(box_of(index, want.shape), []).append(device)
    return [_DeviceBox(box, np.empty(shape_of(box), want.dtype), d) for box, d in devices.items()]


def _placed(want: Any, boxes: list[_DeviceBox]) -> jax.Array:
    kind = want.sharding.memory_kind
    pieces = [
        jax.device_put(own.values, SingleDeviceSharding(device, memory_kind=kind))
        for own in boxes
        for device in own.devices
    ]
    return jax.make_array_from_single_device_arrays(want.shape, want.sharding, pieces)


def _bytes(values: np.ndarray) -> np.ndarray:
    """The bytes of a contiguous array, as a view."""
    return values.reshape(-1).view(np.uint8)


def _check_finite(name: str, values: np.ndarray) -> None:
    floating = jax.dtypes.issubdtype(values.dtype, np.floating)
    if floating and (bad := values.size - np.count_nonzero(np.isfinite(values))):
        raise InputError(
            f"{name}: expected finite values to save, found {bad} that are not: a training "
            "diverged, or an imported file is corrupt"
        )
