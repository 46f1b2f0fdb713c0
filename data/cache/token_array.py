"""The shards of a split as one long array of tokens, without copying them.

Creating one reads no storage. A shard is opened when a window first touches it and must then match
its `check`. Every chunk is checked each time it is read. Four bytes stay in memory for every chunk
of the shards opened so far, and a bounded number of files stays open.
"""

from __future__ import annotations

import functools
import resource
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import numpy as np
import tensorstore as ts

from data.cache import chunks
from data.cache.chunks import CHUNK, ChunkChecker
from data.cache.shard_io import DataFile, Fill, ShardHead, corrupt, open_data, read_head
from data.cache.token_shard import TokenShard
from pipeline.errors import InputError
from pipeline.store import storage
from pipeline.store.parallel import in_order

_AT_ONCE = 64  # chunks read, checked and copied out together: they fit a core's own cache
_MOST_OPEN = 4096  # most open files, where the limit of the process allows

_DATA = chunks.data_file(chunks.TOKENS)


class _Piece(NamedTuple):
    """The part of a window in one shard, in at most `_AT_ONCE` chunks: `first` to `last` - 1."""

    shard: int
    first: int
    last: int
    skip: int  # tokens of the first chunk before the piece
    size: int
    row: int
    column: int


class _Records(threading.local):
    """Per-thread buffers that every read reuses."""

    def __init__(self, dtype: np.dtype) -> None:
        self.records = np.empty((_AT_ONCE, chunks.record_bytes(dtype)), np.uint8)
        self.tokens = chunks.tokens_of(self.records, dtype)
        self.checksums = np.empty(_AT_ONCE, np.uint32)


class TokenArray:
    """Random access to the tokens of many shards. Safe to read from several threads.

    `tokenizer_digest` is the SHA-256 that the shards' tokenizer must have; "" accepts any.
    """

    def __init__(
        self, shards: Sequence[TokenShard], vocab_size: int, *, tokenizer_digest: str = ""
    ) -> None:
        self.vocab_size = vocab_size
        self.tokenizer_digest = tokenizer_digest
        self.dtype = chunks.token_dtype(vocab_size)
        self._shards = [TokenShard(*shard) for shard in shards]
        # Where each shard ends in the joined array: int64 [shards].
        self.shard_ends = np.cumsum(np.array([s.tokens for s in self._shards], np.int64))
        self._begins = np.concatenate([np.zeros(1, np.int64), self.shard_ends])
        self._local = all(storage.is_local(shard.directory) for shard in self._shards)
        self._record = chunks.record_bytes(self.dtype)
        self._checker = ChunkChecker(self.dtype, _AT_ONCE)
        self._checksums: dict[int, np.ndarray] = {}
        # The open files of shards; a file that falls out is closed when no thread reads it.
        opening = functools.partial(_open, self._shards, self.dtype)
        self._file = functools.lru_cache(maxsize=_open_at_most())(opening)
        self._own = _Records(self.dtype)

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __enter__(self) -> TokenArray:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.cache_clear()

    def read(self, starts: np.ndarray, length: int, out: np.ndarray | None = None) -> np.ndarray:
        """Windows of the joined array, which may cross shard boundaries: int32 (n, length).

        `out` is filled and returned if it is given. Raises `InputError` for a shard of another
        tokenizer, `CorruptOutput` for one that is not what was written.
        """
        starts = np.asarray(starts, np.int64)
        if out is None:
            out = np.empty((len(starts), length), np.int32)
        if len(starts) and (min(found := starts.tolist()) < 0 or max(found) + length > len(self)):
            raise IndexError(f"expected windows inside [0, {len(self)}), got starts {starts}")
        assert (out.shape, out.dtype) == ((len(starts), length), np.int32)
        assert out.flags.c_contiguous
        if not out.size:
            return out
        # side="right" skips empty shards, whose end equals that of the shard before.
        shards = np.searchsorted(self.shard_ends, starts, side="right")
        begins = (starts - self._begins[shards]).tolist()
        shards = shards.tolist()
        self._load_heads(set(shards))
        if self._local and self._whole_chunks(shards, begins, length):
            self._read_chunks(shards, begins, out)
        else:
            self._read(self._pieces(shards, begins, length), out)
        return out

    def _whole_chunks(self, shards: list[int], begins: list[int], length: int) -> bool:
        """Whether every window consists of whole chunks of one shard."""
        if length % CHUNK or length > _AT_ONCE * CHUNK:
            return False
        for shard, begin in zip(shards, begins, strict=True):
            if begin % CHUNK or begin + length > self._shards[shard].tokens:
                return False
        return True

    def _read_chunks(self, shards: list[int], begins: list[int], out: np.ndarray) -> None:
        """Fast path of `_read` for windows of whole chunks, which are copied out many at a time."""
        own, width = self._own, out.shape[1] // CHUNK
        records, checksums, tokens = own.records, own.checksums, own.tokens
        together = _AT_ONCE // width
        # As many rows as the buffer takes: read them, check them in one go, copy them out.
        for row in range(0, len(shards), together):
            group, used = [], 0
            for shard, begin in zip(shards[row : row + together], begins[row:], strict=False):
                first, end = begin // CHUNK, used + width
                self._file(shard).read_into(first * self._record, records[used:end])
                checksums[used:end] = self._checksums[shard][first : first + width]
                group.append((shard, first, first + width))
                used = end
            if not self._checker.agree(records[:used], checksums[:used]):
                self._blame(group)
            out[row : row + together].reshape(-1, CHUNK)[:] = tokens[:used]

    def _read(self, pieces: Iterable[_Piece], out: np.ndarray) -> None:
        # Sorted, a piece may lie in the chunks of the one before, which are read once.
        parts: list[list[_Piece]] = []
        for piece in sorted(pieces):
            before = parts[-1][0] if parts else None
            if before and piece.shard == before.shard and piece.last <= before.last:
                parts[-1].append(piece)
            else:
                parts.append([piece])
        self._load_heads({part[0].shard for part in parts})
        # Read as many chunks as the buffer takes, check them in one go, copy them out, continue.
        used, group = 0, list[tuple[list[_Piece], int]]()
        for part, fill in zip(parts, self._request(parts), strict=True):
            count = part[0].last - part[0].first
            if used + count > _AT_ONCE:
                self._deliver(group, used, out)
                used, group = 0, []
            fill(self._own.records[used : used + count])
            group.append((part, used))
            used += count
        self._deliver(group, used, out)

    def _pieces(self, shards: list[int], begins: list[int], length: int) -> Iterator[_Piece]:
        """Split the windows into pieces inside one shard that are small enough to read at once."""
        for row, (shard, begin) in enumerate(zip(shards, begins, strict=True)):
            column = 0
            while column < length:
                first, skip = divmod(begin, CHUNK)
                end = min(self._shards[shard].tokens, (first + _AT_ONCE) * CHUNK)
                if size := min(length - column, end - begin):
                    last = first + chunks.chunk_count(skip + size)
                    yield _Piece(shard, first, last, skip, size, row, column)
                column += size
                begin += size
                if begin == self._shards[shard].tokens:
                    shard, begin = shard + 1, 0

    def _load_heads(self, shards: set[int]) -> None:
        """Read and check the heads of shards that no window touched before."""
        new = sorted(shards - self._checksums.keys())
        if not new:
            return
        found = [self._shards[shard] for shard in new]
        heads = in_order(lambda s: read_head(s.directory, s.check), found, found[0].directory)
        for number, shard, head in zip(new, found, heads, strict=True):
            self._checksums[number] = self._checked(shard, head)

    def _checked(self, shard: TokenShard, head: ShardHead) -> np.ndarray:
        """The checksums of a head, which must fit the shard and this array."""
        if (head.tokens, head.dtype) != (shard.tokens, self.dtype):
            raise corrupt(
                shard.directory,
                f"{head.tokens} tokens of {head.dtype.name} instead of "
                f"{shard.tokens} tokens of {self.dtype.name}",
            )
        made_by, ids = head.attributes["tokenizer"], head.attributes["vocab_size"]
        if self.tokenizer_digest and made_by != self.tokenizer_digest:
            raise InputError(
                f"{shard.directory}: expected tokens of the tokenizer {self.tokenizer_digest}, "
                f"found those of {made_by or 'an unnamed one'}; tokenise again, or use the "
                "tokenizer they were made with"
            )
        if ids > self.vocab_size:
            raise InputError(
                f"{shard.directory}: expected ids below vocab_size={self.vocab_size}, found a "
                f"vocabulary of {ids}; use the vocabulary that the tokens were made with"
            )
        return head.checksums

    def _request(self, parts: list[list[_Piece]]) -> Iterable[Fill]:
        """Start the reads of a bucket in one batch, which joins neighbours; local reads start when
        they are needed, so that no more files are open than may be."""
        if self._local:
            return (self._begin(part[0], None) for part in parts)
        with ts.Batch() as batch:
            return [self._begin(part[0], batch) for part in parts]

    def _begin(self, piece: _Piece, batch: ts.Batch | None) -> Fill:
        size = (piece.last - piece.first) * self._record
        return self._file(piece.shard).start_read(piece.first * self._record, size, batch)

    def _deliver(self, group: list[tuple[list[_Piece], int]], used: int, out: np.ndarray) -> None:
        """Check the records that were read and copy their pieces to `out`."""
        own = self._own
        for (whole, *_), at in group:
            checksums = self._checksums[whole.shard][whole.first : whole.last]
            own.checksums[at : at + whole.last - whole.first] = checksums
        if not self._checker.agree(own.records[:used], own.checksums[:used]):
            self._blame((part[0].shard, part[0].first, part[0].last) for part, _ in group)
        for part, at in group:
            for piece in part:
                begin = at + piece.first - part[0].first
                tokens = own.tokens[begin : begin + piece.last - piece.first]
                target = out[piece.row, piece.column : piece.column + piece.size]
                if piece.skip or piece.size % CHUNK:
                    target[:] = tokens.reshape(-1)[piece.skip : piece.skip + piece.size]
                else:
                    target.reshape(-1, CHUNK)[:] = tokens

    def _blame(self, group: Iterable[tuple[int, int, int]]) -> NoReturn:
        """Raise for the first chunk of (shard, first chunk, chunk after the last) that is not what
        was written.
        """
        own, at = self._own, 0
        for shard, first, last in group:
            for index in range(first, last):
                if not self._checker.agree(own.records[at : at + 1], own.checksums[at : at + 1]):
                    directory = self._shards[shard].directory
                    raise corrupt(directory, f"corrupt chunk {index} of {_DATA}")
                at += 1
        raise AssertionError("chunks that are sound one by one are sound together")


def _open(shards: Sequence[TokenShard], dtype: np.dtype, shard: int) -> DataFile:
    directory, tokens, _ = shards[shard]
    return open_data(directory, chunks.data_bytes(tokens, dtype))


def _open_at_most() -> int:
    """A quarter of the process's limit of open files: 257 under the usual limit of 1,024."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN if allowed == resource.RLIM_INFINITY else min(allowed // 4 + 1, _MOST_OPEN)
