"""Reads the files of a token shard from a local disk, gs:// or s3://.

Ranges of the tokens' file are read with `pread` on a disk (`data/cache/chunks.py` gives the
reason), and in a bucket through TensorStore's key-value store, which retries, limits the requests
in flight and joins neighbouring ranges of one batch. Neither checks the bytes it returns.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorstore as ts

from data.cache import chunks
from pipeline.errors import CorruptOutput, InputError, StorageError, StoreUnavailable
from pipeline.store import storage

TIMEOUT_S = 600.0  # longest wait for one response of a store
RETRY_SECONDS = 90.0  # of these retries in all, about, as for the project's other bucket requests
BUCKET_RETRIES = {"max_retries": 9, "initial_delay": "250ms", "max_delay": "16s"}

# Status codes, with which TensorStore's messages begin. First: the stored data is corrupt.
_CORRUPT = ("NOT_FOUND", "OUT_OF_RANGE", "DATA_LOSS")
# The store did not answer, even after TensorStore's retries; a new attempt may succeed.
_UNAVAILABLE = ("ABORTED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN")
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_DATA = chunks.data_file(chunks.TOKENS)

Fill: TypeAlias = Callable[[np.ndarray], None]
"""Waits for a range of the data file, and fills a contiguous uint8 array with it."""


@dataclass(frozen=True, eq=False)
class ShardHead:
    """A shard's metadata, verified."""

    tokens: int
    dtype: np.dtype
    checksums: np.ndarray  # uint32 [chunks], CRC-32C of every chunk's tokens
    offsets_checksum: int
    attributes: dict[str, Any]  # vocab_size, eos_id, tokenizer


def open_data(directory: str, size: int) -> DataFile:
    """The tokens' file of the shard in `directory`, for reading ranges of it.

    A local file that is missing or has not `size` bytes is `CorruptOutput` at once.
    """
    if storage.is_local(directory):
        return LocalData(directory, size)
    return StoredData(directory, store_spec(directory))


def read_file(directory: str, name: str) -> bytes:
    """A whole file of the shard in `directory`; `CorruptOutput` if there is none."""
    try:
        return storage.read_bytes(storage.join(directory, name))
    except _MISSING as error:
        raise corrupt(directory, f"no file {name}") from error


def store_spec(directory: str) -> dict[str, Any]:
    """The TensorStore spec of the key-value store of the files below a bucket's directory."""
    scheme, _, place = directory.partition("://")
    bucket, _, path = place.partition("/")
    found: dict[str, Any] = {"bucket": bucket, "path": path.rstrip("/") + "/"}
    if scheme == "gs":
        return {"driver": "gcs", **found}
    if scheme != "s3":
        raise InputError(
            f"{directory}: nothing is written to {scheme}://; use a local path, gs:// or s3://"
        )
    found["driver"] = "s3"
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        # By default the client looks for credential files first and logs each missing one.
        found["aws_credentials"] = {"type": "environment"}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        found |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    return found


def store_context() -> ts.Context:
    """A TensorStore context with bucket retries and no cache, since no byte is read twice."""
    return ts.Context(
        {
            "gcs_request_retries": BUCKET_RETRIES,
            "s3_request_retries": BUCKET_RETRIES,
            "cache_pool": {"total_bytes_limit": 0},
        }
    )


class LocalData:
    """A data file on a local disk, open."""

    _descriptor = -1

    def __init__(self, directory: str, size: int) -> None:
        self._directory = directory
        try:
            path = os.path.join(storage.local_path(directory), _DATA)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except _MISSING as error:
            raise corrupt(directory, f"no file {_DATA}") from error
        except OSError as error:
            raise self._failed(error) from error
        if (found := os.fstat(self._descriptor).st_size) != size:
            raise corrupt(directory, f"{found:,} bytes in {_DATA} instead of {size:,}")

    def __del__(self) -> None:
        # At the last reference, so that a thread in the middle of reading keeps its file.
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def start_read(self, begin: int, size: int, batch: ts.Batch | None) -> Fill:
        """What reads a range."""
        del size, batch
        return functools.partial(self.read_into, begin)

    def read_into(self, begin: int, target: np.ndarray) -> None:
        """Fill a contiguous uint8 array from byte `begin`."""
        try:
            done = os.preadv(self._descriptor, (target.data,), begin)
            while done < target.nbytes:
                more = os.preadv(self._descriptor, (target.reshape(-1)[done:].data,), begin + done)
                if not more:
                    raise corrupt(self._directory, f"a data file that ends at byte {begin + done}")
                done += more
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> StoreUnavailable:
        return StoreUnavailable(f"{self._directory}: {error}; check the storage, run again")


class KeyValueStore:
    """A key-value store of TensorStore whose keys are the files of a directory."""

    def __init__(
        self,
        directory: str,
        spec: dict[str, Any],
        context: ts.Context | None = None,
        seconds: Callable[[], float] = lambda: TIMEOUT_S,
        writing: bool = False,
    ) -> None:
        self.directory = directory
        self._seconds, self._writing = seconds, writing
        self._store = self._wait(ts.KvStore.open(spec, context=context))

    def write(self, name: str, content: bytes) -> None:
        self._wait(self._store.write(name, content))

    def request(self, name: str, **options: Any) -> Callable[[], bytes | None]:
        """Request a file, or a range of it; what is returned waits. None if there is no file."""
        future = self._store.read(name, **options)

        def content() -> bytes | None:
            found = self._wait(future)
            return found.value if found.state == "value" else None

        return content

    def _wait(self, future: Any) -> Any:
        return wait(future, self.directory, self._seconds(), writing=self._writing)


class StoredData:
    """A data file in a bucket."""

    def __init__(self, directory: str, spec: dict[str, Any]) -> None:
        self._directory = directory
        self._store = KeyValueStore(directory, spec, store_context())

    def start_read(self, begin: int, size: int, batch: ts.Batch | None) -> Fill:
        """What waits for a range; its request is sent once the batch is submitted."""
        requested = self._store.request(_DATA, batch=batch, byte_range=slice(begin, begin + size))

        def fill(target: np.ndarray) -> None:
            if (found := requested()) is None:
                raise corrupt(self._directory, f"no file {_DATA}")
            if len(found) != size:
                raise corrupt(self._directory, f"{len(found)} bytes at {begin} of {_DATA}")
            target.reshape(-1)[:] = np.frombuffer(found, np.uint8)

        return fill

    def read_into(self, begin: int, target: np.ndarray) -> None:
        self.start_read(begin, target.nbytes, None)(target)


DataFile: TypeAlias = LocalData | StoredData


def read_head(directory: str, check: str) -> ShardHead:
    """A shard's metadata; its `checksums` must have the hex SHA-256 `check`, unless that is ""."""
    about = read_file(directory, chunks.metadata_file(chunks.TOKENS))
    found = chunks.unseal(read_file(directory, chunks.data_file(chunks.CHECKSUMS)), chunks.CRC)
    if found is None or len(found) < chunks.BEYOND_CHUNKS:
        raise corrupt(directory, "checksums that disagree with their own checksum")
    actual = hashlib.sha256(found.tobytes()).hexdigest()
    if check and actual != check:
        raise corrupt(directory, f"checksums with SHA-256 {actual} instead of {check}")
    checksums, (offsets, metadata) = np.split(found, [-chunks.BEYOND_CHUNKS])
    if chunks.checksum(about) != metadata:
        raise corrupt(directory, "a tokens/zarr.json that disagrees with its checksum")
    # The checksums match, so an unexpected layout from here on was written by other code.
    try:
        tree = json.loads(about)
        head = ShardHead(
            operator.index(tree["shape"][0]),
            np.dtype(tree["data_type"]),
            checksums,
            int(offsets),
            tree["attributes"],
        )
        expected = chunks.tokens_metadata(head.tokens, head.dtype, head.attributes)
    except (ValueError, LookupError, TypeError) as error:
        raise corrupt(directory, f"another layout than this code reads ({error!r})") from error
    if expected != tree or len(checksums) != chunks.chunk_count(head.tokens):
        raise corrupt(directory, "another layout than this code reads")
    return head


def wait(
    future: Any, directory: str, timeout_s: float = TIMEOUT_S, *, writing: bool = False
) -> Any:
    """The result of a TensorStore future; its errors become `CorruptOutput` or `StorageError`."""
    try:
        return future.result(timeout=timeout_s)
    except TimeoutError as error:
        raise StoreUnavailable(
            f"{directory}: no answer from storage in {timeout_s:g} s; check it and run again"
        ) from error
    except (ValueError, OSError) as error:
        # TensorStore has one exception class; the status code is the message's first word.
        reason = " ".join(str(error).split(" [")[0].split())
        if not writing and reason.startswith(_CORRUPT):
            raise corrupt(directory, reason) from error
        kind = StoreUnavailable if reason.startswith(_UNAVAILABLE) else StorageError
        raise kind(f"{directory}: {reason}; check the storage, run again") from error


def corrupt(directory: str, found: str) -> CorruptOutput:
    return CorruptOutput(
        f"{directory}: expected the shard written earlier, found {found}; "
        "rebuild the step that wrote it"
    )
