"""Maps each position of training to a source and to one of that source's sequences.

A mixture is a list of phases, each with a weight for every source. Positions are assigned in blocks
of 2,048 by systematic sampling: a block lays a grid of 2,048 points with its own offset over the
cumulative weights. Offsets follow the golden-ratio Weyl sequence, so that rounding errors cancel: a
source is within 3.2 positions of its weight (measured up to 10^11 positions). A keyed permutation
of the block assigns its points to its positions.

A source's count before a block is a sum of floors over a Weyl sequence, with a closed form in
O(log blocks), so position 10^10 costs as much as position 0. A later phase does not change the
positions before it.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from data.batches.feistel import FeistelPermutation, derive_key
from pipeline.errors import InputError

BLOCK = 2048  # positions assigned together; a power of two

_SHIFT = BLOCK.bit_length() - 1
_TURN = 1 << 64  # offsets are in units of 2^-64 of the distance between two points
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_TABLES = 64  # cached, of 32 KB each


@dataclass(frozen=True, kw_only=True)
class MixturePhase:
    """Weights of the sources from one position of training on.

    Attributes:
        start: first position of the phase, in sequences from the beginning of training.
        weights: a share for every source, in any unit; 0 leaves a source out.
    """

    start: int
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.start < 0:
            raise InputError(
                f"MixturePhase.start={self.start}: expected 0 or more; count from position 0"
            )
        fine = all(math.isfinite(weight) and weight >= 0 for weight in self.weights)
        if not fine or not any(self.weights):
            raise InputError(
                f"MixturePhase.weights={self.weights} (start={self.start}): expected finite "
                "numbers of 0 or more, at least one above 0; give every source its share"
            )


class Mixture:
    """The source and sequence for each position of training. Safe to use from several threads."""

    def __init__(self, phases: Sequence[MixturePhase], seed: int) -> None:
        for number, (before, here) in enumerate(pairwise(phases), 1):
            if here.start <= before.start:
                raise InputError(
                    f"Mixture.phases[{number}].start={here.start}: expected more than "
                    f"{before.start}, the start of the phase before; order the phases by their "
                    "starts"
                )
        assert phases[0].start == 0
        self._starts = np.array([phase.start for phase in phases], np.int64)
        self._dealers = [_Dealer(phase, seed) for phase in phases]
        # A phase may end inside a block; the next phase starts a new block, so lengths round up.
        blocks = -(-np.diff(self._starts) // BLOCK)
        self._first_blocks = np.concatenate([np.zeros(1, np.int64), np.cumsum(blocks)])
        self._before = [np.zeros(len(phases[0].weights), np.int64)]
        for dealer, length in zip(self._dealers, np.diff(self._starts).tolist(), strict=False):
            self._before.append(self._before[-1] + dealer.dealt(length))
        self._table = functools.lru_cache(maxsize=_TABLES)(self._make_table)

    def drawn(self, count: int) -> np.ndarray:
        """Positions of each source among the first `count`: int64 (sources,)."""
        phase = int(np.searchsorted(self._starts, max(count - 1, 0), side="right")) - 1
        return self._before[phase] + self._dealers[phase].dealt(count - int(self._starts[phase]))

    def choose(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each position, and how many earlier positions it has: int64 (n,) both.

        Every (source, index) pair therefore occurs exactly once, across all phases.
        """
        positions = np.asarray(positions, np.int64)
        if positions.size and positions.min() < 0:
            raise IndexError("expected positions of 0 or more")
        phases = np.searchsorted(self._starts, positions, side="right") - 1
        places = positions - self._starts[phases]
        blocks = self._first_blocks[phases] + (places >> _SHIFT)
        slots = places & (BLOCK - 1)
        if len(blocks) and blocks.min() == blocks.max():  # most calls: a batch inside one block
            source, index = self._table(int(blocks[0]))
            return source[slots], index[slots]
        sources, indices = np.empty_like(positions), np.empty_like(positions)
        by_block = np.argsort(blocks, kind="stable")
        cuts = np.flatnonzero(np.diff(blocks[by_block])) + 1
        for chosen in np.split(by_block, cuts) if len(positions) else []:
            source, index = self._table(int(blocks[chosen[0]]))
            sources[chosen], indices[chosen] = source[slots[chosen]], index[slots[chosen]]
        return sources, indices

    def position(self, source: int, index: int) -> int:
        """The position that `choose` maps to (source, index), which must exist."""
        phase = bisect.bisect_right(self._before, index, key=lambda drawn: drawn[source]) - 1
        dealer, rest = self._dealers[phase], index - int(self._before[phase][source])
        end = 1
        while dealer.prefix(end)[source] <= rest:
            end *= 2
        block = bisect.bisect_right(range(end), rest, key=lambda b: dealer.prefix(b)[source]) - 1
        sources, ranks = dealer.deal(block)
        rest -= int(dealer.prefix(block)[source])
        (slot,) = np.flatnonzero((sources == source) & (ranks == rest))
        return int(self._starts[phase]) + block * BLOCK + int(slot)

    def _make_table(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        phase = int(np.searchsorted(self._first_blocks, block, side="right")) - 1
        dealer, number = self._dealers[phase], block - int(self._first_blocks[phase])
        sources, ranks = dealer.deal(number)
        return sources, (self._before[phase] + dealer.prefix(number))[sources] + ranks


class _Dealer:
    """The blocks and prefix counts of one phase, numbered from the start of the phase."""

    def __init__(self, phase: MixturePhase, seed: int) -> None:
        self._name = (seed, "mixture", phase.start)
        self._begin = derive_key(*self._name)
        total = sum(map(Fraction, phase.weights))
        share, edges = Fraction(0), []
        for weight in phase.weights:
            share += Fraction(weight)
            edges.append(math.floor(share / total * BLOCK * _TURN))
        # Edges are cumulative weights in units of 2^-64 points, exact because of Fraction. A block
        # has `whole` points below an edge, and one more if its offset is below `part`.
        self._whole = np.array([edge // _TURN for edge in edges], np.int64)
        self._parts = [edge % _TURN for edge in edges]

    def deal(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Source of each position of a block, and its rank among the block's positions of it."""
        offset = (self._begin + block * _GOLDEN) % _TURN
        below = self._whole + [offset < part for part in self._parts]
        counts = np.diff(below, prepend=0)
        sources = np.repeat(np.arange(len(counts)), counts)
        slots = FeistelPermutation(BLOCK, derive_key(*self._name, block))(np.arange(BLOCK))
        # Sort by (source, slot) in one integer: a source's slots then ascend, in order of rank.
        dealt = np.sort(sources << _SHIFT | slots) & (BLOCK - 1)
        source, rank = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
        source[dealt] = sources
        rank[dealt] = np.arange(BLOCK) - (below - counts)[sources]
        return source, rank

    def dealt(self, length: int) -> np.ndarray:
        """Positions of each source among the first `length` of the phase, int64 (sources,)."""
        block, rest = divmod(length, BLOCK)
        in_last_block = np.bincount(self.deal(block)[0][:rest], minlength=len(self._whole))
        return self.prefix(block) + in_last_block

    def prefix(self, block: int) -> np.ndarray:
        """Positions of each source before a block of the phase, int64 (sources,)."""
        turns = floor_sum(block, _TURN, _GOLDEN, self._begin)
        # [x mod m < f] = floor(x / m) - floor((x + m - f) / m) + 1: 1 if true and 0 if not.
        extra = [
            block + turns - floor_sum(block, _TURN, _GOLDEN, self._begin + _TURN - part)
            for part in self._parts
        ]
        return np.diff(block * self._whole + np.array(extra, np.int64), prepend=0)


def floor_sum(count: int, modulus: int, step: int, start: int) -> int:
    """Sum of floor((start + i * step) / modulus) over i below `count`; all integers 0 or more.

    Euclid's algorithm on (step, modulus): O(log count) additions of exact integers.
    """
    total = 0
    while True:
        total += (count - 1) * count // 2 * (step // modulus) + count * (start // modulus)
        step, start = step % modulus, start % modulus
        top = step * count + start
        if top < modulus:
            return total
        # The sum counts lattice points under a line by columns; count them by rows instead, which
        # swaps the axes and, as in Euclid's algorithm, shrinks (modulus, step).
        count, start, modulus, step = top // modulus, top % modulus, step, modulus
