"""Reads the files of a token shard from a local disk, gs:// or s3://.

Local files are read with `pread` (`data/cache/chunks.py` gives the reason), those of a bucket
through TensorStore's key-value store, which retries, limits the requests in flight and joins
neighbouring ranges of one batch. Neither checks the bytes it returns; `read_head` does.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
from collections.abc import Callable, Mapping
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


def open_files(directory: str, size: int | None = None) -> ShardFiles:
    """The files of the shard in `directory`.

    `size`, the bytes of the tokens' data file, is required for reading ranges of it. A local file
    that is missing or of another size is `CorruptOutput` at once.
    """
    if storage.is_local(directory):
        return LocalFiles(directory, size)
    return StoreFiles(directory, store_spec(directory), store_context())


def store_spec(directory: str) -> dict[str, Any]:
    """The TensorStore spec of the key-value store whose keys are the files of a directory."""
    if storage.is_local(directory):
        return {"driver": "file", "path": storage.local_path(directory).rstrip("/") + "/"}
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


class LocalFiles:
    """A shard on a local disk; keeps the data file open when its size was given."""

    _descriptor = -1

    def __init__(self, directory: str, size: int | None) -> None:
        self.directory = directory
        if size is not None:
            self._descriptor = self._tried(_DATA, _open)
            if (found := os.fstat(self._descriptor).st_size) != size:
                raise corrupt(directory, f"{found:,} bytes in {_DATA} instead of {size:,}")

    def __del__(self) -> None:
        # At the last reference, so that a thread in the middle of reading keeps its file.
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def start_read(self, name: str) -> Callable[[], bytes]:
        """What reads a whole file; raises `CorruptOutput` if there is none."""
        return lambda: self._tried(name, storage.read_bytes)

    def start_range_read(self, begin: int, size: int, batch: ts.Batch | None) -> Fill:
        """What reads a range of the data file."""
        del size, batch
        return functools.partial(self.read_into, begin)

    def read_into(self, begin: int, target: np.ndarray) -> None:
        """Fill a contiguous uint8 array from byte `begin` of the data file."""
        try:
            done = os.preadv(self._descriptor, (target.data,), begin)
            while done < target.nbytes:
                more = os.preadv(self._descriptor, (target.reshape(-1)[done:].data,), begin + done)
                if not more:
                    raise corrupt(self.directory, f"a data file that ends at byte {begin + done}")
                done += more
        except OSError as error:
            raise self._failed(error) from error

    def _tried(self, name: str, read: Callable[[str], Any]) -> Any:
        try:
            return read(os.path.join(storage.local_path(self.directory), name))
        except _MISSING as error:
            raise corrupt(self.directory, f"no file {name}") from error
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> StorageError:
        if isinstance(error, StorageError):
            return error
        return StoreUnavailable(f"{self.directory}: {error}; check the storage, run again")


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


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

    def write_all(self, files: Mapping[str, bytes]) -> None:
        """Write files at once; if one fails, no other is in flight afterwards."""
        failed: StorageError | None = None
        for future in [self._store.write(name, content) for name, content in files.items()]:
            try:
                self._wait(future)
            except StorageError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def create(self, name: str, content: bytes) -> None:
        """Write a file that must not be there yet."""
        there = self._wait(self._store.read(name))
        if there.state == "missing":
            written = self._store.write(name, content, if_equal=there.stamp.generation)
            if self._wait(written).generation:
                return
        # In a bucket the file may be our own, if a response was lost and the request retried. A new
        # attempt has its own directory, so it can succeed: raise the retriable error.
        kind = StorageError if storage.is_local(self.directory) else StoreUnavailable
        raise kind(
            f"{self.directory}: the shard cannot be written: expected an empty directory, found "
            f"another shard's {name}; delete the directory or choose another"
        )

    def request(self, name: str, **options: Any) -> Callable[[], bytes | None]:
        """Request a file, or a range of it; what is returned waits. None if there is no file."""
        future = self._store.read(name, **options)

        def content() -> bytes | None:
            found = self._wait(future)
            return found.value if found.state == "value" else None

        return content

    def _wait(self, future: Any) -> Any:
        return wait(future, self.directory, self._seconds(), writing=self._writing)


class StoreFiles(KeyValueStore):
    """A shard in a bucket, with the methods of `LocalFiles`; a request is sent when it starts."""

    def start_read(self, name: str, **options: Any) -> Callable[[], bytes]:
        requested = self.request(name, **options)

        def content() -> bytes:
            if (found := requested()) is None:
                raise corrupt(self.directory, f"no file {name}")
            return found

        return content

    def start_range_read(self, begin: int, size: int, batch: ts.Batch | None) -> Fill:
        """Its request is sent once the batch is submitted."""
        content = self.start_read(_DATA, batch=batch, byte_range=slice(begin, begin + size))

        def fill(target: np.ndarray) -> None:
            found = content()
            if len(found) != size:
                raise corrupt(self.directory, f"{len(found)} bytes at {begin} of {_DATA}")
            target.reshape(-1)[:] = np.frombuffer(found, np.uint8)

        return fill

    def read_into(self, begin: int, target: np.ndarray) -> None:
        self.start_range_read(begin, target.nbytes, None)(target)


ShardFiles: TypeAlias = LocalFiles | StoreFiles


def start_head_read(files: ShardFiles, check: str) -> Callable[[], ShardHead]:
    """Start reading a shard's head; the returned function waits for it and verifies it.

    `check` is the hex SHA-256 that `checksums` must have; "" skips this check.
    """
    about = files.start_read(chunks.metadata_file(chunks.TOKENS))
    checksums = files.start_read(chunks.data_file(chunks.CHECKSUMS))
    return lambda: _head(files.directory, about(), checksums(), check)


def _head(directory: str, about: bytes, sealed: bytes, check: str) -> ShardHead:
    found = chunks.unseal(sealed, chunks.CRC)
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
