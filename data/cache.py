"""Tokens at rest: one shard is one directory is one TensorStore database.

A shard holds two arrays: `tokens`, the ids of its documents one after the other with EOS after each
and nothing else added, and `offsets`, where each document begins (int64, documents + 1 of them,
from 0). Ids are uint16 when the vocabulary fits, else uint32. Vocabulary, EOS and tokenizer are
attributes of `tokens`, so a shard says what it is.

OCDBT + Zarr 3 + CRC-32C, because a damaged, missing, swapped or truncated file must never read as
data: OCDBT knows which chunks exist, the CRC notices a changed bit, and a chunk that is not there
is an error rather than zeros (chunks that are all zeros are stored to make that sound). A shard is
written in one transaction, so it is there whole or not at all, and is read back before it counts.
File names inside are random; `content_digest` is what two runs can compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from pipeline import storage
from pipeline.errors import DamagedOutput, InputError, StorageError

CHUNK = 8192  # tokens decoded for one aligned read; a sequence of 8,192 costs one range request
TOKENS, OFFSETS = "tokens", "offsets"

_READ_BLOCK = 512 * CHUNK
_TIMEOUT_S = 600.0
_STORE_FAILED = (
    "ABORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
    "UNIMPLEMENTED",
    "UNKNOWN",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardCounts:
    """What was written.

    Attributes:
        tokens: ids in the shard, EOS included.
        documents: documents, each ended by one EOS.
        bytes_on_disk: bytes of the shard's files.
        digest: `content_digest` of the shard, verified by reading it back.
        counts: int64[vocab], how often each id occurs.
    """

    tokens: int
    documents: int
    bytes_on_disk: int
    digest: str
    counts: np.ndarray


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 when every id below `vocab_size` fits, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def write_shard(
    directory: str,
    documents: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    vocab_size: int,
    eos_id: int,
    tokenizer_digest: str = "",
) -> ShardCounts:
    """Write one shard; its tokens are in memory until the end (2 or 4 bytes each).

    Args:
        directory: an absolute local path or a `gs://` URL with nothing in it.
        documents: batches of (ids of all the batch's documents one after the other, number of ids
            of each document), as `TextTokenizer.encode_batch` returns them.
        vocab_size: ids are below it.
        eos_id: the id that ends a document and occurs nowhere else.
        tokenizer_digest: SHA-256 of the tokenizer, kept in the shard's attributes.

    Raises:
        InputError: an id that is not below `vocab_size`, or EOS inside a document.
        StorageError: the shard could not be written, or did not read back as written.
    """
    dtype = token_dtype(vocab_size)
    blocks, lengths = [np.empty(0, dtype)], [np.zeros(1, np.int64)]
    counts = np.zeros(vocab_size, np.int64)
    for ids, batch_lengths in documents:
        _check_ids(ids, vocab_size, eos_id, directory)
        block = _with_eos(ids, batch_lengths, eos_id).astype(dtype)
        counts += np.bincount(block, minlength=vocab_size)
        blocks.append(block)
        lengths.append(np.asarray(batch_lengths, np.int64) + 1)
    tokens, offsets = np.concatenate(blocks), np.cumsum(np.concatenate(lengths))
    attributes = {"vocab_size": vocab_size, "eos_id": eos_id, "tokenizer": tokenizer_digest}
    _write(directory, tokens, offsets, attributes)
    digest = _digest(tokens.dtype, offsets, [tokens])
    _read_back(directory, digest)
    return ShardCounts(
        tokens=len(tokens),
        documents=len(offsets) - 1,
        bytes_on_disk=sum(size for _, size in storage.list_files(directory)),
        digest=digest,
        counts=counts,
    )


def content_digest(directory: str) -> str:
    """Hex SHA-256 over dtype, counts, offsets and tokens of a shard, read from storage.

    Raises:
        DamagedOutput: a part is missing or does not agree with its checksum.
    """
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    tokens = settle(open_array(directory, TOKENS, context), directory)
    offsets = settle(open_array(directory, OFFSETS, context), directory)
    blocks = (
        settle(tokens[begin : min(begin + _READ_BLOCK, tokens.shape[0])].read(), directory)
        for begin in range(0, tokens.shape[0], _READ_BLOCK)
    )
    return _digest(tokens.dtype.numpy_dtype, settle(offsets.read(), directory), blocks)


def read_offsets(directory: str) -> np.ndarray:
    """Where each document begins, and the end of the last: int64[documents + 1]."""
    array = settle(open_array(directory, OFFSETS, ts.Context()), directory)
    return settle(array.read(), directory)


def describe(directory: str) -> dict[str, Any]:
    """A shard's own account: tokens, documents, dtype, vocab_size, eos_id, tokenizer."""
    context = ts.Context()
    tokens = settle(open_array(directory, TOKENS, context), directory)
    offsets = settle(open_array(directory, OFFSETS, context), directory)
    return {
        "tokens": tokens.shape[0],
        "documents": offsets.shape[0] - 1,
        "dtype": tokens.dtype.name,
        **tokens.spec().to_json()["metadata"]["attributes"],
    }


def unigram_entropy(counts: np.ndarray) -> float:
    """Entropy of the ids' frequencies in nats per token: the loss of a model of frequencies alone.

    Args:
        counts: how often each id occurs, summed over shards.
    """
    total = int(counts.sum())
    if total == 0:
        raise InputError("unigram entropy: no tokens were counted; tokenise some documents first")
    seen = counts[counts > 0] / total
    return float(-(seen * np.log(seen)).sum())


def open_array(directory: str, name: str, context: ts.Context) -> ts.Future:
    """Begin to open one array of a shard for reading; settle the future with `settle`."""
    return ts.open(_spec(directory, name), open=True, read=True, context=context)


def settle(future: ts.Future, directory: str, timeout_s: float = _TIMEOUT_S) -> Any:
    """The future's result, with errors in this project's terms.

    Raises:
        DamagedOutput: what is stored is missing, cut short or changed.
        StorageError: the store failed or did not answer in `timeout_s` seconds.
    """
    try:
        return future.result(timeout=timeout_s)
    except TimeoutError as error:
        raise StorageError(
            f"{directory}: no answer from storage in {timeout_s:g} s; check it and run again"
        ) from error
    except (ValueError, OSError) as error:
        # TensorStore has one exception class; the status code is the message's first word, and an
        # invalid argument (bytes that decode to nonsense) has none.
        reason = " ".join(str(error).split(" [")[0].split())
        if reason.startswith(_STORE_FAILED):
            raise StorageError(f"{directory}: {reason}; check the storage, run again") from error
        raise DamagedOutput(
            f"{directory}: expected the shard written earlier, found {reason}; "
            "rebuild the step that wrote it"
        ) from error


def _check_ids(ids: np.ndarray, vocab_size: int, eos_id: int, directory: str) -> None:
    if ids.size and int(ids.max()) >= vocab_size:
        raise InputError(
            f"{directory}: found id {int(ids.max())}, expected ids below vocab_size={vocab_size}; "
            "use the tokenizer that the vocabulary size belongs to"
        )
    if (ids == eos_id).any():
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


def _write(
    directory: str, tokens: np.ndarray, offsets: np.ndarray, attributes: dict[str, Any]
) -> None:
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    transaction = ts.Transaction(atomic=True)
    for name, array in ((TOKENS, tokens), (OFFSETS, offsets)):
        spec = _spec(directory, name)
        spec["metadata"] = _metadata(array, attributes if name == TOKENS else {})
        opening = ts.open(spec, create=True, context=context, transaction=transaction)
        _settle_write(_settle_write(opening, directory).write(array), directory)
    _settle_write(transaction.commit_async(), directory)


def _settle_write(future: Any, directory: str) -> Any:
    """As `settle`; while writing, nothing has been finished that could be damaged."""
    try:
        return settle(future, directory)
    except DamagedOutput as error:
        raise StorageError(
            f"{directory}: the shard cannot be written: {error.__cause__}"
        ) from error


def _read_back(directory: str, digest: str) -> None:
    try:
        found = content_digest(directory)
    except DamagedOutput as error:
        found = str(error)
    if found != digest:
        raise StorageError(
            f"{directory}: the shard does not read back as written: expected content {digest}, "
            f"found {found}; check the storage and run again"
        )


def _metadata(array: np.ndarray, attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        "shape": list(array.shape),
        "data_type": array.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [CHUNK]}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "zstd", "configuration": {"level": 1}},
            {"name": "crc32c"},
        ],
        "attributes": attributes,
    }


def _spec(directory: str, name: str) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {"driver": "ocdbt", "base": _kvstore(directory)},
        "path": name,
        # Published shards never change: what was true at opening stays true.
        "recheck_cached_data": "open",
        "recheck_cached_metadata": "open",
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }


def _kvstore(directory: str) -> dict[str, Any]:
    if storage.is_local(directory):
        return {"driver": "file", "path": storage.local_path(directory).rstrip("/") + "/"}
    if directory.startswith("gs://"):
        bucket, _, path = directory.removeprefix("gs://").partition("/")
        return {"driver": "gcs", "bucket": bucket, "path": path.rstrip("/") + "/"}
    raise InputError(f"{directory}: token shards lie on a local path or on gs://; choose one")


def _digest(dtype: np.dtype, offsets: np.ndarray, blocks: Iterable[np.ndarray]) -> str:
    little = np.dtype(dtype).newbyteorder("<")
    digest = hashlib.sha256(f"{dtype.name} {len(offsets) - 1} {offsets[-1]}\n".encode())
    digest.update(offsets.astype("<i8").tobytes())
    for block in blocks:
        digest.update(block.astype(little, copy=False).tobytes())
    return digest.hexdigest()
