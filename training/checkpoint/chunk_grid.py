"""The chunk grid of a checkpoint's arrays: each is a Zarr 3 array whose chunks have one writer.

    arrays/<name>/zarr.json   shape, dtype and chunks, for Zarr readers
    arrays/<name>/c.0.1       chunk 0, 1: little-endian values and their CRC-32C

Every shard of an array is a whole number of chunks, so processes write independently and nothing is
padded. A reader takes the chunks that overlap what it needs, so it may use any mesh.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ARRAYS = "arrays"
CHUNK_BYTES = 32 << 20  # size of one object in a bucket; many transfers are in flight at once
CRC_BYTES = 4

# Half-open range along every axis.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChunkGrid:
    """An array cut into chunks of one shape, numbered in row-major order."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    @staticmethod
    def of(entry: Mapping[str, Any]) -> ChunkGrid:
        """The grid of an array's entry in the index."""
        return ChunkGrid(tuple(entry["shape"]), tuple(entry["chunk"]))

    @property
    def count(self) -> tuple[int, ...]:
        """Chunks along every axis."""
        return tuple(-(-size // step) for size, step in zip(self.shape, self.chunk, strict=True))

    def box(self, index: tuple[int, ...]) -> Box:
        return tuple((i * step, (i + 1) * step) for i, step in zip(index, self.chunk, strict=True))

    def overlapping(self, box: Box) -> Iterator[tuple[int, ...]]:
        """Chunks that share a value with `box`, in order."""
        ranges = [
            range(begin // step, -(-end // step))
            for (begin, end), step in zip(box, self.chunk, strict=True)
        ]
        return itertools.product(*ranges)

    def number(self, index: tuple[int, ...]) -> int:
        """Row-major number of chunk `index`."""
        found = 0
        for i, size in zip(index, self.count, strict=True):
            found = found * size + i
        return found

    def every(self) -> Iterator[tuple[int, ...]]:
        """All chunks in order of their number."""
        return itertools.product(*map(range, self.count))


def chunk_shape(shard: tuple[int, ...], itemsize: int, most: int) -> tuple[int, ...]:
    """A shape that divides `shard` into chunks of about `most` bytes or less.

    Cuts the leading axes first. An axis stays whole when its divisors would give more than four
    times as many parts as needed, so a chunk can be larger than `most`.
    """
    chunk = [max(1, size) for size in shard]
    for axis, size in enumerate(chunk):
        parts = -(-math.prod(chunk) * itemsize // most)
        if parts > 1:
            # The smallest divisor of the axis that gives at least as many parts as needed.
            divisor = next(n for n in range(min(parts, size), size + 1) if size % n == 0)
            chunk[axis] = size // divisor if divisor <= 4 * parts else size
    return tuple(chunk)


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The box of a shard's slices, as JAX gives them."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in box)


def common(one: Box, other: Box) -> Box:
    """The overlap of two boxes, which must overlap."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def within(box: Box, outer: Box) -> tuple[Any, ...]:
    """An index of the view of `box` in an array that holds `outer`.

    The trailing `...` makes the index of a scalar array (no axes) give a view too.
    """
    slices = [slice(a - c, b - c) for (a, b), (c, _) in zip(box, outer, strict=True)]
    return (*slices, ...)


def chunk_file(name: str, index: tuple[int, ...]) -> str:
    return f"{ARRAYS}/{name}/" + ".".join(["c", *map(str, index)])


def metadata_file(name: str) -> str:
    return f"{ARRAYS}/{name}/zarr.json"


def metadata(entry: dict[str, Any]) -> bytes:
    """zarr.json of an array, by its entry in the index."""
    tree = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": entry["shape"],
        "data_type": entry["dtype"],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": entry["chunk"]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
        "fill_value": False if entry["dtype"] == "bool" else 0,
        "attributes": {},
    }
    if entry["axes"] is not None:
        tree["dimension_names"] = entry["axes"]
    return json.dumps(tree).encode()
