"""Writes documents to a token shard on disk or in a bucket, and reads a shard's metadata.

A shard holds the concatenated ids of its documents, with EOS after each, and the start of each
document, in the layout of `data/cache/chunks.py`; the same documents give the same bytes.

A corrupt, missing, swapped or truncated file must never read as data. Every file is written
atomically, and the whole shard is read back before `write_shard` returns, against checksums of the
tokens as given, not of TensorStore's output. A reader that passes the `ShardCounts.check` of a
shard (the ledger keeps it) accepts the tokens of no other shard.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorstore as ts

from data.cache import chunks
from data.cache.chunks import CHUNK, ChunkChecker, token_dtype
from data.cache.shard_io import (
    ShardFiles,
    ShardHead,
    corrupt,
    open_files,
    start_head_read,
    store_context,
    store_spec,
    wait,
)
from pipeline.errors import CorruptOutput, InputError, StorageError

_READ_BLOCK = 1024  # chunks per request: a few MiB, which bounds the number of bucket requests


class TokenShard(NamedTuple):
    """One shard of a `TokenArray`; without its `ShardCounts.check`, "", another intact shard of
    the same size in its place is not detected.
    """

    directory: str
    tokens: int
    check: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardCounts:
    """Sizes, digests (SHA-256) and id counts of a written shard."""

    tokens: int
    documents: int
    digest: str  # over tokens, offsets, dtype and counts
    check: str  # of the shard's checksums, which identifies the shard to readers
    counts: np.ndarray  # int64[vocab], occurrences of each id


def write_shard(
    directory: str,
    documents: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    vocab_size: int,
    eos_id: int | None,
    bos_id: int | None = None,
    tokenizer_digest: str = "",
) -> ShardCounts:
    """Write one shard and read it back.

    All tokens stay in memory until the end (2 or 4 bytes each), and two more copies of them while
    TensorStore encodes and writes.

    Args:
        directory: an empty directory: an absolute local path or a URL of gs:// or s3://.
        documents: batches of (concatenated ids, number of ids of each document).
        eos_id: the id that ends a document and occurs nowhere else; None appends no id.
        bos_id: the id to put before a document; None, or EOS, which begins the next one, for none.

    Raises:
        InputError: an id is not below `vocab_size`, EOS is inside a document, or `directory` is on
            an unsupported store.
        StorageError: the shard could not be written, did not read back as written, or its directory
            already holds a shard.
    """
    open_files(directory)  # refuses an unsupported store before any work
    dtype = token_dtype(vocab_size)
    blocks: deque[np.ndarray] = deque()
    digest = hashlib.sha256()
    lengths = [np.zeros(1, np.int64)]
    counts = np.zeros(vocab_size, np.int64)
    for ids, batch_lengths in documents:
        # Frame each document of the batch: BOS before it where that is not EOS, EOS behind it.
        _check_ids(ids, vocab_size, eos_id, directory)
        block = ids.astype(dtype, copy=False)
        if bos_id is not None and bos_id != eos_id:
            starts = np.cumsum(batch_lengths) - batch_lengths
            block, batch_lengths = np.insert(block, starts, bos_id), batch_lengths + 1
        if eos_id is not None:
            block = _with_eos(block, batch_lengths, eos_id)
        # Count and digest it now; tokens of all batches are joined once, at the end.
        counts += np.bincount(block, minlength=vocab_size)
        blocks.append(block)
        digest.update(np.ascontiguousarray(block).data)
        lengths.append(np.asarray(batch_lengths, np.int64) + (eos_id is not None))
    offsets = np.cumsum(np.concatenate(lengths))
    attributes = {"vocab_size": vocab_size, "eos_id": eos_id, "tokenizer": tokenizer_digest}
    tokens = _whole_chunks(blocks, int(offsets[-1]), dtype)
    check = _write(directory, tokens, offsets.astype(chunks.OFFSET), attributes)
    digest.update(offsets.astype(chunks.OFFSET).tobytes())
    digest.update(f"{dtype.name} {len(offsets) - 1} {offsets[-1]}\n".encode())
    return ShardCounts(
        tokens=int(offsets[-1]),
        documents=len(offsets) - 1,
        digest=digest.hexdigest(),
        check=check,
        counts=counts,
    )


def read_offsets(directory: str, check: str = "") -> np.ndarray:
    """The start of each document and the end of the last: int64[documents + 1]."""
    files = open_files(directory)
    return _offsets(files, start_head_read(files, check)())


def unigram_entropy(counts: np.ndarray) -> float:
    """Unigram entropy in nats per token: the loss of a model that predicts frequencies alone."""
    total = int(counts.sum())
    if total == 0:
        raise InputError("unigram entropy: no tokens were counted; tokenise some documents first")
    seen = counts[counts > 0] / total
    return float(-(seen * np.log(seen)).sum())


def _check_ids(ids: np.ndarray, vocab_size: int, eos_id: int | None, directory: str) -> None:
    if ids.size and int(ids.max()) >= vocab_size:
        raise InputError(
            f"{directory}: found id {int(ids.max())}, expected ids below vocab_size={vocab_size}; "
            "use the tokenizer that the vocabulary size belongs to"
        )
    if eos_id is not None and (ids == eos_id).any():
        raise InputError(
            f"{directory}: found EOS (id {eos_id}) inside a document, where it would forge a "
            "boundary; encode with TextTokenizer, which keeps it text"
        )


def _with_eos(ids: np.ndarray, lengths: np.ndarray, eos_id: int) -> np.ndarray:
    """`ids` with EOS after each document."""
    assert len(ids) == lengths.sum(), "the lengths of the documents do not add up to the ids"
    ends = np.cumsum(lengths) + np.arange(len(lengths))
    joined = np.empty(len(ids) + len(lengths), ids.dtype)
    is_eos = np.zeros(len(joined), bool)
    is_eos[ends] = True
    joined[is_eos] = eos_id
    joined[~is_eos] = ids
    return joined


def _whole_chunks(blocks: deque[np.ndarray], count: int, dtype: np.dtype) -> np.ndarray:
    """The tokens of all blocks, zero-padded to whole chunks; empties `blocks` to save memory."""
    tokens, at = np.zeros(chunks.chunk_count(count) * CHUNK, dtype), 0
    while blocks:
        block = blocks.popleft()
        tokens[at : at + len(block)] = block
        at += len(block)
    return tokens


def _write(
    directory: str, tokens: np.ndarray, offsets: np.ndarray, attributes: dict[str, Any]
) -> str:
    """Write the arrays and read them back; returns the shard's check."""
    count = int(offsets[-1])
    beyond = len(tokens) // CHUNK + chunks.BEYOND_CHUNKS
    about = {
        chunks.TOKENS: chunks.tokens_metadata(count, tokens.dtype, attributes),
        chunks.OFFSETS: chunks.plain_metadata(len(offsets), chunks.OFFSET),
        chunks.CHECKSUMS: chunks.plain_metadata(beyond, chunks.CRC),
    }
    files = open_files(directory)
    with _writing(directory) as begin:
        # Create `tokens` first and alone: its creation is exclusive, so only one process continues.
        begin({chunks.TOKENS: (about[chunks.TOKENS], tokens[:count])})
        checksums = chunks.chunk_checksums(tokens)
        checksums += [chunks.checksum(offsets), _checksum_of_file(files, chunks.TOKENS)]
        every = np.array(checksums, chunks.CRC)
        small = {chunks.OFFSETS: offsets, chunks.CHECKSUMS: every}
        begin({name: (about[name], values) for name, values in small.items()})
    check = hashlib.sha256(every.tobytes()).hexdigest()
    try:
        _read_back(files, check, about, offsets)
    except CorruptOutput as error:
        raise _does_not_read_back(directory, error) from error
    return check


def _checksum_of_file(files: ShardFiles, array: str) -> int:
    """CRC-32C of the zarr.json of an array that was just created."""
    try:
        return chunks.checksum(files.start_read(chunks.metadata_file(array))())
    except CorruptOutput as error:
        raise _does_not_read_back(files.directory, error) from error


def _does_not_read_back(directory: str, error: CorruptOutput) -> StorageError:
    """`error` with the advice for an unfinished shard."""
    found = str(error).removeprefix(f"{directory}: ").rpartition("; ")[0]
    return StorageError(
        f"{directory}: the shard does not read back as written: {found}; check the storage and "
        "run again"
    )


def _read_back(
    files: ShardFiles, check: str, about: dict[str, dict[str, Any]], offsets: np.ndarray
) -> None:
    """Read and verify every byte of a new shard."""
    for array, expected in about.items():
        name = chunks.metadata_file(array)
        try:
            same = json.loads(files.start_read(name)()) == expected
        except ValueError:
            same = False
        if not same:
            raise corrupt(files.directory, f"another layout in {name}")
    head = start_head_read(files, check)()
    if not np.array_equal(_offsets(files, head), offsets):
        raise corrupt(files.directory, "other offsets")
    if head.tokens:
        _check_data(head, files.directory)


def _check_data(head: ShardHead, directory: str) -> None:
    """Raise unless every chunk is sound and Zarr's index is the layout that readers assume."""
    files = open_files(directory, chunks.data_bytes(head.tokens, head.dtype))
    count, record = len(head.checksums), chunks.record_bytes(head.dtype)
    checker = ChunkChecker(head.dtype, min(_READ_BLOCK, count))
    for first in range(0, count, _READ_BLOCK):
        checksums = head.checksums[first : first + _READ_BLOCK]
        records = np.empty((len(checksums), record), np.uint8)
        files.read_into(first * record, records)
        if not checker.agree(records, checksums):
            raise corrupt(directory, f"corrupt chunks {first} to {first + len(records) - 1}")
    tail = np.empty(count * 16 + chunks.CRC.itemsize, np.uint8)
    files.read_into(count * record, tail)
    expected = chunks.regular_index(count, head.dtype)
    found = chunks.unseal(tail.tobytes(), expected.dtype)
    if found is None or not np.array_equal(found.reshape(-1, 2), expected):
        raise corrupt(directory, f"another index in {chunks.data_file(chunks.TOKENS)}")


def _offsets(files: ShardFiles, head: ShardHead) -> np.ndarray:
    sealed = files.start_read(chunks.data_file(chunks.OFFSETS))()
    found = chunks.unseal(sealed, chunks.OFFSET)
    crc = int.from_bytes(sealed[-chunks.CRC.itemsize :], "little")  # `unseal` verifies it
    if found is None or crc != head.offsets_checksum:
        raise corrupt(files.directory, "offsets that disagree with their checksum")
    return found.astype(np.int64)


@contextmanager
def _writing(directory: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What writes arrays, {name: (parsed zarr.json, values)}; they are durable when the block ends.

    However it ends, no write is in flight afterwards, unless the store did not answer in time.
    """
    store, context = store_spec(directory), store_context()
    begun: list[ts.Future | ts.WriteFutures] = []

    def create(name: str, metadata: dict[str, Any]) -> ts.Future:
        spec = {
            "driver": "zarr3",
            "kvstore": store | {"path": f"{store['path']}{name}/"},
            "metadata": metadata,
            # Without this TensorStore writes no file for all zeros, which would read as corrupt.
            "store_data_equal_to_fill_value": True,
        }
        return ts.open(spec, create=True, context=context)

    def begin(arrays: dict[str, Any]) -> None:
        opening = [create(name, metadata) for name, (metadata, _) in arrays.items()]
        begun.extend(opening)
        for opened, (_, values) in zip(opening, arrays.values(), strict=True):
            array = wait(opened, directory, writing=True)
            if values.size:
                begun.append(array.write(values, can_reference_source_data_indefinitely=True))

    failed: StorageError | None = None
    try:
        yield begin
    finally:
        for future in begun:
            try:
                wait(future, directory, writing=True)
            except StorageError as error:
                failed = failed or error
    if failed is not None:
        raise failed
