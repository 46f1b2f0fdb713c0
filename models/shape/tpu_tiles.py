"""What a block of queries sees in our attention kernel for TPUs, and what that costs.

`models.attention.tpu_kernel` computes scores of [chunk of keys, block of queries]. The costs are
those of the TPU compiler's schedule for v6e, which knows nothing of waiting for memory
(`python -m tests.bench.attention_cycles`). Imports no JAX: plans use it too.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

LANES = 128
SAFE = 60.0
"""The largest |score| whose exponential needs no shift.

exp(+-60) is 1e+-26: sums over 2^20 keys, and products with values between 1e-11 and 1e5, are normal
float32 numbers, and bfloat16 has the same exponents.
"""
LARGEST_BLOCK = 2304
CHUNKS = (128, 256, 384, 512)
STEP_CYCLES = 600
"""Overhead of one grid step, as assumed in `models.shape.splash_tiles`."""
LATENCY = 110
"""Cycles until the matrix unit's first results, once for each stretch of instructions."""
PIECE_CYCLES = 110
"""Cycles that a piece of a partial chunk takes beside its scores."""
VECTOR_MEMORY = 88 * 2**20
"""Bytes that a kernel may plan with, of the 96 MiB that it may use."""


class Piece(NamedTuple):
    """Queries [first, last) of a block beside one chunk of keys, and which rules hide scores."""

    first: int
    last: int
    causal: bool
    windowed: bool

    @property
    def masked(self) -> bool:
        return self.causal or self.windowed


@dataclass(frozen=True)
class Sight:
    """The keys that a block of queries sees, in chunks."""

    block: int  # queries of a grid step, a multiple of `chunk`; blocks start at multiples of it
    chunk: int  # keys whose scores are computed at a time, a multiple of 128
    window: int | None  # positions that a query sees, itself included; None for all before it

    @property
    def whole(self) -> int | None:
        """How many chunks before the block all its queries see; None for all."""
        return None if self.window is None else max(0, self.window - self.block) // self.chunk

    def partial(self) -> list[list[int]]:
        """Offsets, from the block's first query, of chunks that only some of its queries see.

        Those of list m exist where m blocks are before this one.
        """
        groups = [list(range(0, self.block, self.chunk))]
        if self.window is not None and self.whole is not None:
            first = -(-(self.window - 1) // self.chunk) * self.chunk
            for offset in range(-first, -self.whole * self.chunk, self.chunk):
                before = -(offset // self.block)
                groups += [[] for _ in range(before + 1 - len(groups))]
                groups[before].append(offset)
        return groups

    def pieces(self, offset: int) -> list[Piece]:
        """The queries that see a chunk of keys at `offset`, cut where another mask begins."""
        reach = 2**31 if self.window is None else self.window
        first, unmasked = max(0, offset), offset + self.chunk
        # A query from `late` on does not see the chunk's first key, one from `last` on none.
        late = (offset + reach) // LANES * LANES
        last = min(self.block, -(-(offset + self.chunk - 1 + reach) // LANES) * LANES)
        cuts = sorted({min(max(at, first), last) for at in (first, unmasked, late, last)})
        return [Piece(a, b, a < unmasked, b > late) for a, b in itertools.pairwise(cuts)]


@dataclass(frozen=True)
class Costs:
    """Cycles of 1,000 unmasked scores in the schedule, by chunk."""

    forward: dict[int, float]
    shifted: dict[int, float]
    backward: dict[int, float]


COSTS = {
    64: Costs(
        forward={128: 1.68, 256: 1.28, 384: 1.45, 512: 1.37},
        shifted={128: 2.54, 256: 2.71, 384: 2.70, 512: 2.65},
        backward={128: 4.19, 256: 3.88, 384: 4.03, 512: 3.80},
    ),
    128: Costs(
        forward={128: 2.38, 256: 1.58, 384: 1.76, 512: 1.55},
        shifted={128: 3.07, 256: 3.03, 384: 2.97, 512: 2.88},
        backward={128: 5.44, 256: 4.35, 384: 4.55, 512: 4.24},
    ),
    256: Costs(
        forward={128: 3.68, 256: 2.23, 384: 2.45, 512: 2.11},
        shifted={128: 4.47, 256: 3.71, 384: 3.48, 512: 3.34},
        backward={128: 8.79, 256: 5.45, 384: 6.22, 512: 5.18},
    ),
}
"""By head size, for blocks of about 2,048 queries, less `LATENCY`."""


class Row(NamedTuple):
    """The scores of one head of a sequence: of its last `queries` positions with all `keys`."""

    queries: int
    keys: int
    head_size: int
    window: int | None
    shift: bool


def needs_shift(normalized: bool, soft_cap: float | None) -> bool:
    """Whether scores beyond `SAFE` are usual: neither a cap nor norms of queries and keys."""
    return not normalized and (soft_cap is None or soft_cap > SAFE)


@functools.cache
def choose_sight(row: Row) -> Sight:
    """The cheapest block and chunk; `row.queries` is a multiple of 128."""
    blocks = [n for n in range(LANES, LARGEST_BLOCK + 1, LANES) if row.queries % n == 0]
    every = [Sight(b, c, row.window) for b in blocks for c in CHUNKS if b % c == 0]
    return min(every, key=lambda sight: (sum(row_cycles(row, sight)), -sight.block))


@functools.cache
def row_cycles(row: Row, sight: Sight, group: int = 1) -> tuple[float, float]:
    """Scheduled cycles of a row, forward and backward; `group` query heads share a key head."""
    nearest = COSTS[min(COSTS, key=lambda size: abs(size - row.head_size))]
    lanes = row.head_size / 1024  # vector registers of one position
    forward = backward = 0.0
    units = (nearest.shifted if row.shift else nearest.forward), nearest.backward
    one, two = (unit[sight.chunk] / 1000 for unit in units)
    full = sight.chunk * sight.block
    for start in range(row.keys - row.queries, row.keys, sight.block):
        chunks = start // sight.chunk
        chunks = chunks if sight.whole is None else min(chunks, sight.whole)
        stretches, scores, pieces = chunks, float(chunks * full), 0
        for before, offsets in enumerate(sight.partial()):
            if offsets and start >= before * sight.block:
                stretches += 1
                for piece in itertools.chain.from_iterable(map(sight.pieces, offsets)):
                    scores += sight.chunk * (piece.last - piece.first)
                    pieces += 1
        rest = STEP_CYCLES + LATENCY * stretches + PIECE_CYCLES * pieces
        forward += scores * one + rest + 3 * lanes * sight.block
        backward += scores * two + rest + 4 * lanes * sight.block
    # The sums of keys and values are cleared and written once for a key head.
    return forward, backward + 3 * lanes * row.keys / group


def buffers_of(row: Row, sight: Sight, itemsize: int, segments: bool) -> int:
    """2 where vector memory can hold the next head's keys too, 1 where it holds one, else 0."""
    whole = row.head_size * row.keys
    blocks = row.head_size * sight.block * (4 * itemsize * 2 + 4)
    rest = blocks + (row.keys * LANES * 4 if segments else 0)
    rest += 32 * 2**20 if itemsize == 4 else 0  # parts of float32 operands
    # Keys, values and their cotangents, and float32 sums of these, in the backward kernel.
    fits = (whole * (4 * itemsize * n + 2 * 4) + rest < VECTOR_MEMORY for n in (2, 1))
    return next((n for n, fit in zip((2, 1), fits, strict=True) if fit), 0)
