"""What a run trains on: sources of tokens, shuffled and mixed into one endless order of rows.

The mixture gives the source that a position draws from and how many rows it has drawn before, and
the source's shuffle maps that count to one of its rows.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.batches.block_shuffle import BlockShuffle
from data.batches.mixture import Mixture, MixturePhase
from data.batches.sequences import SequenceReader, row_count
from data.cache.token_array import TokenArray
from data.cache.token_shard import TokenShard
from pipeline.errors import InputError
from pipeline.store import storage


@dataclass(frozen=True, kw_only=True)
class TokenSource:
    """Tokens that are shuffled together."""

    name: str
    shards: tuple[TokenShard, ...]
    io_block_size: int
    window_blocks: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """A data set in plain values; equal specs give the same order of rows.

    Attributes:
        masked: whether stored ids carry a loss mask: an id of `vocab_size` or more is the token
            `id - vocab_size`, whose prediction is excluded from the loss.
        begins: whether an id of `2 * vocab_size` or more is such a token, and begins a segment.
        moved: (position, other position), ascending: the first reads what the other one would.
    """

    sources: tuple[TokenSource, ...]
    phases: tuple[MixturePhase, ...] = ()  # empty: every source in proportion to its rows
    sequence_length: int
    vocab_size: int
    eos_id: int
    tokenizer: str = ""  # its SHA-256, checked against every shard; "" skips the check
    seed: int = 0
    masked: bool = False
    begins: bool = False
    moved: tuple[tuple[int, int], ...] = ()

    @property
    def stored_ids(self) -> int:
        """Exclusive upper bound of the stored ids."""
        return self.vocab_size * (1 + self.masked + self.begins)


class Piece(NamedTuple):
    """Tokens of one shard, `begin` to `begin + size` - 1; source and shard are numbers from 0."""

    source: int
    shard: int
    begin: int
    size: int


def epochs(spec: DatasetSpec, rows: int) -> tuple[float, ...]:
    """How often the first `rows` rows of the order read each source; 1 is every row of it once."""
    length = spec.sequence_length
    counts = tuple(row_count([shard.tokens for shard in s.shards], length) for s in spec.sources)
    mixture = _mixture(spec, counts)
    drawn = (rows,) if mixture is None else mixture.drawn(rows).tolist()
    return tuple(read / count for read, count in zip(drawn, counts, strict=True))


class Dataset:
    """The rows of a spec. Safe to read from several threads; a context manager."""

    def __init__(self, spec: DatasetSpec) -> None:
        if not spec.sources:
            raise InputError("DatasetSpec.sources: found none; give at least one source")
        self.spec = spec
        self.sequence_length = spec.sequence_length
        shards = [shard for source in spec.sources for shard in source.shards]
        self.is_local = all(storage.is_local(shard.directory) for shard in shards)
        self._tokens = TokenArray(shards, spec.stored_ids, tokenizer_digest=spec.tokenizer)
        self._rows = SequenceReader(
            self._tokens, spec.sequence_length, [len(source.shards) for source in spec.sources]
        )
        self.sequences = self._rows.count  # of all sources together
        counts = self._rows.counts
        self._begins = np.cumsum([0, *counts])[:-1].tolist()
        self._first_shards = np.cumsum([0, *(len(s.shards) for s in spec.sources)])[:-1].tolist()
        self._orders = [
            _order(source, spec.sequence_length, count)
            for source, count in zip(spec.sources, counts, strict=True)
        ]
        self._mixture = _mixture(spec, counts)
        self._moved = np.array(spec.moved, np.int64).reshape(-1, 2).T

    def _unmoved(self, positions: np.ndarray) -> np.ndarray:
        positions, (moved, others) = np.asarray(positions, np.int64), self._moved
        if not len(moved):
            return positions
        at = np.minimum(np.searchsorted(moved, positions), len(moved) - 1)
        return np.where(moved[at] == positions, others[at], positions)

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """The row at each position: int64 (n,), rows of all sources numbered consecutively."""
        positions = self._unmoved(positions)
        if self._mixture is None:
            return self._orders[0].rows(positions)
        sources, indices = self._mixture.choose(positions)
        rows = np.empty_like(positions)
        for source, order in enumerate(self._orders):
            mine = np.flatnonzero(sources == source)
            if len(mine):
                rows[mine] = self._begins[source] + order.rows(indices[mine])
        return rows

    def read(self, positions: np.ndarray) -> np.ndarray:
        """The sequences at `positions`: int32 (n, sequence_length)."""
        return self._rows.read(self.rows(positions))

    def origins(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each position and its epoch there, both from 0: int64 (n,) both."""
        indices = positions = self._unmoved(positions)
        sources = np.zeros_like(positions)
        if self._mixture is not None:
            sources, indices = self._mixture.choose(positions)
        return sources, indices // np.array(self._rows.counts, np.int64)[sources]

    def pieces(self, row: int) -> list[Piece]:
        """Where the tokens of a row are, in their order."""
        found = []
        for start, size in self._rows.pieces(row):
            # A row ends where its shard has no more tokens, so a piece is inside one shard.
            shard = int(np.searchsorted(self._tokens.shard_ends, start, side="right"))
            begin = start - (int(self._tokens.shard_ends[shard - 1]) if shard else 0)
            source = bisect.bisect_right(self._first_shards, shard) - 1
            found.append(Piece(source, shard - self._first_shards[source], begin, size))
        return found

    def positions(self, piece: Piece, end: int) -> dict[int, np.ndarray]:
        """By row that has any of a piece's tokens, the positions below `end` that read the row.

        Computed by the inverse of the order, for which nothing before `end` is visited.
        """
        source = piece.source
        shard = self._first_shards[source] + piece.shard
        rows = self._rows.rows_with(shard, piece.begin, piece.begin + piece.size)
        last = max(end, *self._moved[1] + 1) if len(self._moved[1]) else end
        found = {row: self._positions(source, row, last) for row in rows.tolist()}
        return {row: self._after_moves(positions, end) for row, positions in found.items()}

    def _after_moves(self, positions: np.ndarray, end: int) -> np.ndarray:
        """The positions below `end` that read what `positions` would if none were moved."""
        moved, others = self._moved
        kept = positions[(positions < end) & ~np.isin(positions, moved)]
        return np.sort(np.concatenate([kept, moved[np.isin(others, positions) & (moved < end)]]))

    def _positions(self, source: int, row: int, end: int) -> np.ndarray:
        order, mixture = self._orders[source], self._mixture
        drawn = end if mixture is None else int(mixture.drawn(end)[source])
        inside, found = row - self._begins[source], []
        for epoch in range(-(-drawn // order.sequences)):
            index = epoch * order.sequences + order.place(inside, epoch)
            if index < drawn:
                found.append(index if mixture is None else mixture.position(source, index))
        return np.array(found, np.int64)

    def close(self) -> None:
        self._tokens.close()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _order(source: TokenSource, length: int, count: int) -> BlockShuffle:
    if not count:
        tokens = sum(shard.tokens for shard in source.shards)
        raise InputError(
            f"source {source.name}: {tokens} tokens hold no sequence of sequence_length={length}; "
            "use more documents or a shorter sequence"
        )
    return BlockShuffle(
        sequences=count,
        io_block_size=source.io_block_size,
        window_blocks=source.window_blocks,
        seed=source.seed,
    )


def _mixture(spec: DatasetSpec, counts: tuple[int, ...]) -> Mixture | None:
    for phase in spec.phases:
        if len(phase.weights) != len(counts):
            names = ", ".join(source.name for source in spec.sources)
            raise InputError(
                f"the phase from sequence {phase.start} has {len(phase.weights)} weights, expected "
                f"{len(counts)}, one for each source ({names}); use 0 for none"
            )
    if spec.phases:
        return Mixture(spec.phases, spec.seed)
    if len(counts) > 1:
        return Mixture((MixturePhase(start=0, weights=tuple(map(float, counts))),), spec.seed)
    return None
