"""Tile sizes of the splash kernel, by sequence length, head size and window.

A cost model chooses them. In the TPU compiler's schedule for v6e (`python -m
tests.bench.attention_cycles`) a tile's cost is proportional to its number of scores within 10%, and
a partly masked tile costs as much as a full one. Each grid step has a fixed overhead, even when its
tile is fully masked, which makes JAX's default of 128 several times slower for every shape. Imports
no JAX: memory and time estimates use it too.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Literal, NamedTuple

LANES = 128
LARGEST = 2304
MOST_COMPUTE = 768

STEP_CYCLES = 600
"""Overhead of one grid step, about a third of a microsecond.

An assumption: the compiler's schedule does not show it.
"""

HBM_BYTES_PER_CYCLE = 937
"""1.64 TB/s at 1.75 GHz."""

MOST_PARTIAL_SUMS = 2 * 2**30
"""Bytes per device that the fused backward kernel may allocate for partial sums in one layer."""
COSTS = {
    64: {"forward": 3.0, "fused": 5.5, "keys_values": 4.4, "queries": 3.5},
    128: {"forward": 3.1, "fused": 5.5, "keys_values": 4.4, "queries": 3.5},
    256: {"forward": 3.4, "fused": 5.8, "keys_values": 4.6, "queries": 3.7},
}
"""Cycles per 1,000 scores of a tile, by head size, for tiles of 1024 with 512 keys per step."""

NARROW_COMPUTE = {128: (1.8, 1.2), 256: (1.2, 1.0)}
"""Cost factors (forward, backward) by keys per inner step, for steps below 384 keys."""


class TileGrid(NamedTuple):
    """Tiles of one kernel's grid for one head: `visited` are not fully masked, `steps` are all."""

    visited: int
    steps: int

    def partial_sums(self, tile: tuple[int, int], head_size: int) -> float:
        """Cycles in which the fused kernel's partial sums move through memory without compute.

        The final sum reads all of them, and those of fully masked tiles are written.
        """
        written = self.steps * tile[0] * _lanes(head_size) * 2
        return written * (2 - self.visited / self.steps) / HBM_BYTES_PER_CYCLE


@dataclasses.dataclass(frozen=True)
class ScoreMatrix:
    """The scores of one sequence that one device computes: the last `queries` of all positions."""

    queries: int
    keys: int
    window: int | None

    def grid(self, tile: tuple[int, int], kernel: str) -> TileGrid:
        """The grid of a kernel; all kernels but the fused one shrink their grid to the mask."""
        block_q, block_kv = tile
        start = self.keys - self.queries
        reach = self.keys if self.window is None else self.window
        by_query, by_key = self.queries // block_q, self.keys // block_kv

        def seen_by(first: int) -> int:
            """Key blocks that the query block starting at `first` attends to, at least in part."""
            oldest = max(0, (first - reach + 1) // block_kv)
            return -(-(first + block_q) // block_kv) - oldest

        def seeing(first: int) -> int:
            """Query blocks that attend to the key block starting at `first`, at least in part."""
            earliest = max(0, (first - start) // block_q)
            latest = -(-(first + block_kv + reach - 1 - start) // block_q)
            return max(0, min(by_query, latest) - earliest)

        rows = [seen_by(first) for first in range(start, self.keys, block_q)]
        if kernel == "fused":
            steps = by_query * by_key
        elif kernel == "keys_values":
            steps = by_key * max(seeing(first) for first in range(0, self.keys, block_kv))
        else:
            steps = by_query * max(rows)
        return TileGrid(sum(rows), steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """The fields of the kernel's `BlockSizes` without the layouts."""

    block_q: int
    block_kv: int
    block_kv_compute: int
    block_q_dkv: int
    block_kv_dkv: int
    block_kv_dkv_compute: int
    block_q_dq: int | None
    block_kv_dq: int | None
    use_fused_bwd_kernel: bool


@functools.cache
def choose_tiles(
    position: int,
    head_size: int,
    window: int | None = None,
    sequence_shards: int = 1,
    heads: int = 1,
) -> Tiles:
    """The cheapest tile sizes for a sequence length.

    Every size is a multiple of 128 that divides the positions it tiles, and all compile within the
    96 MiB of scoped vector memory that `training.step.state` sets. The fused backward kernel is
    used where it costs less than the two separate ones: it computes the scores once, but writes
    partial sums of the queries' gradients for every block of keys, of which `MOST_PARTIAL_SUMS`
    limits the bytes.

    `sequence_shards` devices share a sequence's queries; `position` is a multiple of 128 times
    these. `heads` are the query heads of all sequences that a device computes at once.
    """
    row = ScoreMatrix(position // sequence_shards, position, window)
    forward = _cheapest(row, head_size, "forward")
    fused = _cheapest(row, head_size, "fused", heads)
    keys_values = _cheapest(row, head_size, "keys_values")
    queries = _cheapest(row, head_size, "queries")
    use_fused = fused[0] <= keys_values[0] + queries[0]
    backward = fused[1] if use_fused else keys_values[1]
    return Tiles(
        block_q=forward[1][0],
        block_kv=forward[1][1],
        block_kv_compute=compute_block(forward[1][1]),
        block_q_dkv=backward[0],
        block_kv_dkv=backward[1],
        block_kv_dkv_compute=compute_block(backward[1]),
        block_q_dq=None if use_fused else queries[1][0],
        block_kv_dq=None if use_fused else queries[1][1],
        use_fused_bwd_kernel=use_fused,
    )


@functools.cache
def row_cycles(
    position: int, head_size: int, window: int | None, sequence_shards: int = 1
) -> float:
    """Scheduled cycles of both passes for one head of a sequence, with `choose_tiles`."""
    row = ScoreMatrix(position // sequence_shards, position, window)
    kernels = ("forward", "fused", "keys_values", "queries")
    forward, fused, *apart = (_cheapest(row, head_size, kernel)[0] for kernel in kernels)
    return forward + min(fused, sum(apart))


def compute_block(block_kv: int) -> int:
    """Keys per inner step, a divisor of `block_kv`: about 512, and 1024 from `block_kv` 2048 on."""
    for size in (1024, 512, 384):
        if block_kv % size == 0 and (size < 1024 or block_kv >= 2048):
            return size
    return max(size for size in _divisors(block_kv) if size <= MOST_COMPUTE)


def only_narrow_tiles(position: int, head_size: int, sequence_shards: int = 1) -> bool:
    """Whether the sequence length allows only tiles of 128, the slowest."""
    sizes = choose_tiles(position, head_size, None, sequence_shards)
    return position > LANES == min(sizes.block_q, sizes.block_kv)


def partial_sums_bytes(position: int, head_size: int, sequence_shards: int, block_kv: int) -> int:
    """Bytes of the fused kernel's bfloat16 partial sums for one query head of one sequence."""
    return position // block_kv * (position // sequence_shards) * _lanes(head_size) * 2


def _lanes(head_size: int) -> int:
    """`head_size` padded to the TPU's lanes."""
    return -(-head_size // LANES) * LANES


def _cheapest(
    row: ScoreMatrix, head_size: int, kernel: str, heads: int = 1
) -> tuple[float, tuple[int, int]]:
    """Cycles and (queries, keys) of the cheapest tile; infinite cycles where no tile is allowed."""
    shards = row.keys // row.queries

    def cycles(tile: tuple[int, int]) -> float:
        partial = partial_sums_bytes(row.keys, head_size, shards, tile[1])
        if kernel == "fused" and heads * partial > MOST_PARTIAL_SUMS:
            return math.inf
        return _cycles(row, tile, head_size, kernel)

    tiles = itertools.product(_divisors(row.queries), _divisors(row.keys))
    return min((cycles(tile), tile) for tile in tiles)


def _cycles(row: ScoreMatrix, tile: tuple[int, int], head_size: int, kernel: str) -> float:
    block_q, block_kv = tile
    grid = row.grid(tile, kernel)
    nearest = min(COSTS, key=lambda known: abs(known - head_size))
    work = COSTS[nearest][kernel] * block_q * block_kv / 1000
    if kernel != "queries":
        at_a_time = NARROW_COMPUTE.get(compute_block(block_kv), (1.0, 1.0))
        work *= at_a_time[kernel != "forward"]
    cycles = grid.visited * work + grid.steps * STEP_CYCLES
    return cycles + (grid.partial_sums(tile, head_size) if kernel == "fused" else 0.0)


def _divisors(positions: int) -> list[int]:
    """Multiples of 128 that divide a number of positions and fit into vector memory."""
    return [size for size in range(LANES, LARGEST + 1, LANES) if positions % size == 0]


def choose_way(
    kv_heads: int, chunk_fits: bool, window: int | None, shards: int
) -> Literal["heads", "zigzag", "gathered"]:
    """How `models.attention.context_parallel` divides a sequence's attention over `shards` devices.

    `chunk_fits`: the kernel can tile half of a device's positions. `kv_heads`: one device's own.
    """
    if kv_heads % shards == 0:
        return "heads"
    return "zigzag" if chunk_fits and window is None else "gathered"
