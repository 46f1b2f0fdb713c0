"""Writes documents to a token shard on disk or in a bucket, and reads a shard's metadata.

A shard holds the concatenated ids of its documents, with EOS after each, and the start of each
document, in the layout of `data/cache/chunks.py`; the same documents give the same bytes.

A corrupt, missing, swapped or truncated file must never read as data. Every file is written
atomically, and the whole shard is read back before `write_shard` returns. A reader that passes the
`ShardCounts.check` of a shard (the ledger keeps it) accepts the tokens of no other shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from data.cache import chunks
from data.cache.chunks import CHUNK, token_dtype
from data.cache.shard_io import corrupt, read_file, read_head, store_spec
from pipeline.errors import CorruptOutput, InputError, StorageError
from pipeline.store import storage


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
    they are encoded and written.

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
    if not storage.is_local(directory):
        store_spec(directory)  # refuses an unsupported store before any work
    dtype = token_dtype(vocab_size)
    blocks: list[np.ndarray] = []
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
        assert len(block) == batch_lengths.sum(), "the documents' lengths do not add up to the ids"
        if eos_id is not None:
            block = np.insert(block, np.cumsum(batch_lengths), eos_id)
        # Count and digest it now; tokens of all batches are joined once, at the end.
        counts += np.bincount(block, minlength=vocab_size)
        blocks.append(block)
        digest.update(np.ascontiguousarray(block).data)
        lengths.append(np.asarray(batch_lengths, np.int64) + (eos_id is not None))
    offsets = np.cumsum(np.concatenate(lengths))
    attributes = {"vocab_size": vocab_size, "eos_id": eos_id, "tokenizer": tokenizer_digest}
    count = int(offsets[-1])
    tokens = np.zeros(chunks.chunk_count(count) * CHUNK, dtype)
    np.concatenate([tokens[:0], *blocks], out=tokens[:count])
    blocks.clear()
    check = _write(directory, tokens, offsets.astype(chunks.OFFSET), attributes)
    digest.update(offsets.astype(chunks.OFFSET).tobytes())
    digest.update(f"{dtype.name} {len(offsets) - 1} {count}\n".encode())
    return ShardCounts(
        tokens=count,
        documents=len(offsets) - 1,
        digest=digest.hexdigest(),
        check=check,
        counts=counts,
    )


def read_offsets(directory: str, check: str = "") -> np.ndarray:
    """The start of each document and the end of the last: int64[documents + 1]."""
    head = read_head(directory, check)
    sealed = read_file(directory, chunks.data_file(chunks.OFFSETS))
    found = chunks.unseal(sealed, chunks.OFFSET)
    crc = int.from_bytes(sealed[-chunks.CRC.itemsize :], "little")  # `unseal` verifies it
    if found is None or crc != head.offsets_checksum:
        raise corrupt(directory, "offsets that disagree with their checksum")
    return found.astype(np.int64)


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


def _write(
    directory: str, tokens: np.ndarray, offsets: np.ndarray, attributes: dict[str, Any]
) -> str:
    """Write the files of a shard and read them back; returns the shard's check."""
    about = chunks.tokens_metadata(int(offsets[-1]), tokens.dtype, attributes)
    described = _json(about)
    crcs = chunks.chunk_checksums(tokens)
    every = np.array([*crcs, chunks.checksum(offsets), chunks.checksum(described)], chunks.CRC)
    written = {chunks.metadata_file(chunks.TOKENS): described}
    if crcs:
        written[chunks.data_file(chunks.TOKENS)] = chunks.encoded(tokens, every[: len(crcs)])
    for name, array in ((chunks.OFFSETS, offsets), (chunks.CHECKSUMS, every)):
        written[chunks.metadata_file(name)] = _json(chunks.plain_metadata(len(array), array.dtype))
        written[chunks.data_file(name)] = chunks.seal(array)
    first, *rest = ((storage.join(directory, name), content) for name, content in written.items())
    try:
        # Create the first file alone: its creation is exclusive, so only one process continues.
        if not storage.create(*first):
            raise StorageError(
                f"{directory}: the shard cannot be written: expected an empty directory, found "
                "another shard; delete the directory or choose another"
            )
        # Whatever fails, no write is in flight when the pool is left.
        with ThreadPoolExecutor(len(rest)) as pool:
            list(pool.map(lambda file: storage.write_atomic(*file), rest))
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{directory}: {error}; check the storage, run again") from error
    _read_back(directory, written)
    return hashlib.sha256(every.tobytes()).hexdigest()


def _json(metadata: dict[str, Any]) -> bytes:
    return json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode()


def _read_back(directory: str, written: dict[str, bytes]) -> None:
    """Compare every byte of a new shard with what was written."""
    for name, content in written.items():
        try:
            wrong = "" if read_file(directory, name) == content else f"other bytes in {name}"
        except CorruptOutput as error:
            wrong = str(error).removeprefix(f"{directory}: ").rpartition("; ")[0]
        if wrong:
            raise StorageError(
                f"{directory}: the shard does not read back as written: {wrong}; check the storage "
                "and run again"
            )
