"""Writes arrays as chunks and reads them back, with checksums that detect corruption."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import google_crc32c
import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pipeline.errors import InputError, StorageError
from pipeline.store import storage
from training.checkpoint.chunk_grid import (
    CRC_BYTES,
    Box,
    ChunkGrid,
    box_of,
    chunk_file,
    common,
    metadata,
    metadata_file,
    shape_of,
    within,
)
from training.checkpoint.device_to_host import HostShard
from training.checkpoint.files import FORMAT, INDEX, PROGRESS, Files, in_parallel, with_digest

_AHEAD_BYTES = 512 << 20  # host memory of a restore: values read and not yet on a device
_STRIDE = 1 << 20  # bytes per call of `extend`, which holds the GIL


def checksum(data: np.ndarray) -> int:
    """CRC-32C of a contiguous uint8 array."""
    found = 0
    for begin in range(0, data.nbytes, _STRIDE):
        found = google_crc32c.extend(found, data[begin : begin + _STRIDE])  # type: ignore[bad-argument-type]
    return found


class CheckpointWriter:
    """Writes the files of a checkpoint, and its index by their digests.

    `leaves` has the entry of every array in the index, without digests.

    Attributes:
        written: what was written, as JSON: in "chunks", by array, [number, CRC-32C of the values,
            SHA-256 of the file] of each chunk; in "files" [path, bytes, SHA-256] of each other one.
    """

    def __init__(self, files: Files, leaves: Mapping[str, dict[str, Any]]) -> None:
        self.path = files.path
        self.written: dict[str, Any] = {"chunks": defaultdict(list), "files": []}
        self._files, self._leaves = files, leaves
        self._grids = {name: ChunkGrid.of(entry) for name, entry in leaves.items()}

    def write(self, shards: Iterable[HostShard]) -> None:
        """Write the chunks of shards.

        Raises:
            InputError: a parameter or moment (an array with named axes) is not finite.
        """
        tasks = [(s, index) for s in shards for index in self._grids[s.name].overlapping(s.box)]

        def write(task: tuple[HostShard, tuple[int, ...]]) -> tuple[int, int, str]:
            shard, index = task
            grid = self._grids[shard.name]
            values = np.ascontiguousarray(shard.values[within(grid.box(index), shard.box)])
            if self._leaves[shard.name]["axes"] is not None:
                _check_finite(shard.name, values)
            data = _bytes(values)
            crc = checksum(data)
            tail = crc.to_bytes(CRC_BYTES, "little")
            digest = hashlib.sha256(data.data)
            digest.update(tail)
            self._files.write(chunk_file(shard.name, index), data.data, tail)
            return grid.number(index), crc, digest.hexdigest()

        results = in_parallel(write, tasks, self._files.threads)
        for (shard, _), result in zip(tasks, results, strict=True):
            self.written["chunks"][shard.name].append(result)

    def complete(self, progress: bytes) -> None:
        """Write the files beside the chunks: zarr.json of every array, and the progress."""
        small = {metadata_file(name): metadata(entry) for name, entry in self._leaves.items()}
        for name, content in {**small, PROGRESS: progress}.items():
            self._files.write(name, content)
            self.remember(name, content)

    def remember(self, name: str, content: bytes) -> None:
        """Add a small file that was written already."""
        digest = hashlib.sha256(content).hexdigest()
        self.written["files"].append((name, len(content), digest))

    def join(self, written: Mapping[str, Any]) -> None:
        """Add what another process has `written`."""
        for name, chunks in written["chunks"].items():
            self.written["chunks"][name] += chunks
        self.written["files"] += written["files"]

    def write_index(self, step: int) -> None:
        """Write the index, which completes the checkpoint; `StorageError` if chunks lack."""
        described = {}
        for name, entry in self._leaves.items():
            chunks = sorted(map(tuple, self.written["chunks"][name]))
            expected = math.prod(self._grids[name].count)
            if [number for number, _, _ in chunks] != list(range(expected)):
                raise StorageError(
                    f"{self.path}: expected {expected} chunks of {name}, the processes wrote "
                    f"{len(chunks)}; their shardings of it differ"
                )
            digests = {"crc32c": [crc for _, crc, _ in chunks], "sha256": [d for _, _, d in chunks]}
            described[name] = entry | digests
        files = sorted(map(list, self.written["files"]))
        content = {"format": FORMAT, "step": step, "leaves": described, "files": files}
        storage.write_atomic(storage.join(self.path, INDEX), with_digest(content))


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
            # Later arrays are read while earlier ones go to their devices.
            for name, want in target.items():
                entry, boxes = leaves[name], _device_boxes(want)
                needed: dict[tuple[int, ...], list[_DeviceBox]] = defaultdict(list)
                for own in boxes:
                    for index in ChunkGrid.of(entry).overlapping(own.box):
                        needed[index].append(own)
                futures = [pool.submit(_fill, files, name, entry, *item) for item in needed.items()]
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
    own = _DeviceBox(box, np.empty(shape_of(box), entry["dtype"]), [])
    needed = ChunkGrid.of(entry).overlapping(box)
    in_parallel(lambda index: _fill(files, name, entry, index, [own]), needed, files.threads)
    return own.values


def _fill(
    files: Files,
    name: str,
    entry: Mapping[str, Any],
    index: tuple[int, ...],
    boxes: list[_DeviceBox],
) -> None:
    """Read one chunk, verify its checksums and copy it into the boxes that it overlaps."""
    grid = ChunkGrid.of(entry)
    box = grid.box(index)
    values = _read_buffer(box, boxes)
    data, tail = _bytes(values), np.empty(CRC_BYTES, np.uint8)
    file = chunk_file(name, index)
    files.read(file, data, tail)
    found, expected = checksum(data), entry["crc32c"][grid.number(index)]
    # The CRC stored in the chunk (Zarr's codec) detects corruption; the index's CRC also detects
    # a chunk that was replaced by a valid chunk of other values.
    if int.from_bytes(tail.tobytes(), "little") != found or expected != found:
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
    if not jax.dtypes.issubdtype(values.dtype, np.floating):
        return
    with np.errstate(over="ignore", invalid="ignore"):
        # A finite sum proves that all terms are finite, and costs a fraction of testing each one,
        # but not in bfloat16, which numpy sums slowly and whose kind is not "f". A sum that is not
        # finite may be an overflow of finite terms.
        if values.dtype.kind == "f" and np.isfinite(values.sum()):
            return
    if bad := values.size - np.count_nonzero(np.isfinite(values)):
        raise InputError(
            f"{name}: expected finite values to save, found {bad} that are not: a training "
            "diverged, or an imported file is corrupt"
        )
