"""Reading the files of a token shard, from a local disk, gs:// or s3://.

Local files are read with `pread` (`data/cache/chunks.py` says why), those of a bucket through
TensorStore's key-value store, which retries, limits what is under way and joins neighbouring ranges
of one batch. Either way what comes back are bytes that are not checked yet, but for `read_head`,
whose result is sound.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorstore as ts

from data.cache import chunks
from pipeline.errors import CorruptOutput, InputError, StorageError, StoreUnavailable
from pipeline.store import storage

TIMEOUT_S = 600.0
# A minute and a half of trying, as long as other requests to a bucket are tried for.
BUCKET_RETRIES = {"max_retries": 9, "initial_delay": "250ms", "max_delay": "16s"}

_GOOGLE, _AMAZON = "gs://", "s3://"
# How the message begins when the store answered, and what it holds is not what was written.
_DAMAGE = ("NOT_FOUND", "OUT_OF_RANGE", "DATA_LOSS")
# And when it did not answer, after its own retries: a new attempt may do better.
_UNAVAILABLE = ("ABORTED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN")
# And when a file was to be new and is not.
_TAKEN = "ALREADY_EXISTS"
_NOT_THERE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

Bytes = Callable[[], bytes]
Fill = Callable[[np.ndarray], None]


@dataclass(frozen=True, eq=False)
class ShardHead:
    """What a shard says of itself, checked.

    Attributes:
        tokens: how many there are.
        dtype: of the tokens.
        checksums: uint32 [chunks], CRC-32C of every chunk's tokens.
        offsets_checksum: CRC-32C of the offsets.
        attributes: vocab_size, eos_id, tokenizer.
    """

    tokens: int
    dtype: np.dtype
    checksums: np.ndarray
    offsets_checksum: int
    attributes: dict[str, Any]


class ShardFiles(Protocol):
    """The files of one shard."""

    directory: str

    def start_read(self, name: str) -> Bytes:
        """Begin to read a small file; the result gives its content, or raises as `read` does."""
        ...

    def start_range_read(self, begin: int, size: int, batch: ts.Batch) -> Fill:
        """Begin to `read_into`; the result finishes it."""
        ...

    def read_into(self, begin: int, target: np.ndarray) -> None:
        """Fill a contiguous uint8 array from byte `begin` of the tokens' data file.

        Raises:
            CorruptOutput: the file ends before.
            StorageError: the store failed.
        """
        ...


def open_files(directory: str, size: int | None = None, timeout_s: float = TIMEOUT_S) -> ShardFiles:
    """The files of the shard in `directory`.

    Args:
        directory: a local path, or a URL of gs:// or s3://.
        size: bytes of the tokens' data file, when ranges of it are to be read. A local file of
            another size is refused at once.
        timeout_s: longest wait for one answer of a bucket.

    Raises:
        InputError: `directory` is on no store for shards.
        CorruptOutput: there is no such file, or it has another size.
        StorageError: the disk failed.
    """
    if storage.is_local(directory):
        return LocalFiles(directory, size)
    return StoreFiles(directory, store_spec(directory), timeout_s, store_context())


def store_spec(directory: str) -> dict[str, Any]:
    """The key-value store, in TensorStore's terms, that has a directory's files as its keys.

    Raises:
        InputError: we write to no such store.
    """
    if storage.is_local(directory):
        return {"driver": "file", "path": storage.local_path(directory).rstrip("/") + "/"}
    scheme, _, place = directory.partition("://")
    bucket, _, path = place.partition("/")
    found = {"bucket": bucket, "path": path.rstrip("/") + "/"}
    if directory.startswith(_GOOGLE):
        return {"driver": "gcs", **found}
    if directory.startswith(_AMAZON):
        return {"driver": "s3", **found, **_amazon_settings()}
    raise InputError(
        f"{directory}: nothing is written to {scheme}://; use a local path, gs:// or s3://"
    )


def _amazon_settings() -> dict[str, Any]:
    """Login, and address of a store that is not Amazon's, by the variables its clients read."""
    found: dict[str, Any] = {}
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        # Otherwise it looks for files first, and logs each that is not there.
        found["aws_credentials"] = {"type": "environment"}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        found |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    return found


def store_context() -> ts.Context:
    """Retries of a bucket, and no cache: nothing is read or written twice."""
    return ts.Context(
        {
            "gcs_request_retries": BUCKET_RETRIES,
            "s3_request_retries": BUCKET_RETRIES,
            "cache_pool": {"total_bytes_limit": 0},
        }
    )


class LocalFiles:
    """A shard on a local disk; holds the data file open when its size was given."""

    def __init__(self, directory: str, size: int | None) -> None:
        self.directory = directory
        self._path = storage.local_path(directory)
        self._descriptor = -1
        if size is not None:
            self._descriptor = self._open(size)

    def __del__(self) -> None:
        # At the last reference, so that a thread in the middle of reading keeps its file.
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def start_read(self, name: str) -> Bytes:
        """As in `ShardFiles`; reads when the result is asked for."""
        return lambda: self._read(name)

    def start_range_read(self, begin: int, size: int, batch: ts.Batch) -> Fill:
        """As in `ShardFiles`; reads when the result is asked for."""
        del size, batch
        return lambda target: self.read_into(begin, target)

    def read_into(self, begin: int, target: np.ndarray) -> None:
        """As in `ShardFiles`."""
        try:
            done = os.preadv(self._descriptor, (target.data,), begin)
            while done < target.nbytes:
                more = os.preadv(self._descriptor, (target.reshape(-1)[done:].data,), begin + done)
                if not more:
                    raise damaged(self.directory, f"a data file that ends at byte {begin + done}")
                done += more
        except OSError as error:
            raise _failed(self.directory, error) from error

    def _read(self, name: str) -> bytes:
        path = os.path.join(self._path, name)
        try:
            return storage.read_bytes(path)
        except _NOT_THERE as error:
            raise damaged(self.directory, f"no file {name}") from error
        except OSError as error:
            raise _failed(self.directory, error) from error

    def _open(self, size: int) -> int:
        name = chunks.data_file(chunks.TOKENS)
        try:
            descriptor = os.open(os.path.join(self._path, name), os.O_RDONLY | os.O_CLOEXEC)
        except _NOT_THERE as error:
            raise damaged(self.directory, f"no file {name}") from error
        except OSError as error:
            raise _failed(self.directory, error) from error
        found = os.fstat(descriptor).st_size
        if found != size:
            os.close(descriptor)
            raise damaged(self.directory, f"{found:,} bytes in {name} instead of {size:,}")
        return descriptor


class StoreFiles:
    """A shard in a key-value store of TensorStore.

    Args:
        directory: what errors call it.
        spec: of the key-value store that has the shard's files as its keys.
        timeout_s: longest wait for one answer.
        context: limits and retries of the store; None for TensorStore's own.
    """

    def __init__(
        self,
        directory: str,
        spec: dict[str, Any],
        timeout_s: float = TIMEOUT_S,
        context: ts.Context | None = None,
    ) -> None:
        self.directory = directory
        self._timeout_s = timeout_s
        self._store = wait(ts.KvStore.open(spec, context=context), directory, timeout_s)

    def start_read(self, name: str) -> Bytes:
        """As in `ShardFiles`; the request is under way."""
        future = self._store.read(name)
        return lambda: self._content(future, name)

    def start_range_read(self, begin: int, size: int, batch: ts.Batch) -> Fill:
        """As in `ShardFiles`; the request is under way as soon as the batch is submitted."""
        return self._start(begin, size, batch)

    def read_into(self, begin: int, target: np.ndarray) -> None:
        """As in `ShardFiles`."""
        self._start(begin, target.nbytes, None)(target)

    def _start(self, begin: int, size: int, batch: ts.Batch | None) -> Fill:
        name = chunks.data_file(chunks.TOKENS)
        future = self._store.read(name, batch=batch, byte_range=slice(begin, begin + size))

        def read_into(target: np.ndarray) -> None:
            content = self._content(future, name)
            if len(content) != size:
                raise damaged(self.directory, f"{len(content)} bytes at {begin} of {name}")
            target.reshape(-1)[:] = np.frombuffer(content, np.uint8)

        return read_into

    def _content(self, future: ts.Future, name: str) -> bytes:
        found = wait(future, self.directory, self._timeout_s)
        if found.state != "value":
            raise damaged(self.directory, f"no file {name}")
        return found.value


def start_head_read(files: ShardFiles, check: str) -> Callable[[], ShardHead]:
    """Begin to read a shard's head; the result waits for it.

    Args:
        files: of the shard.
        check: hex SHA-256 that `checksums` must have; "" when it is not known.
    """
    about = files.start_read(chunks.metadata_file(chunks.TOKENS))
    checksums = files.start_read(chunks.data_file(chunks.CHECKSUMS))
    return lambda: _head(files.directory, about(), checksums(), check)


def read_head(files: ShardFiles, check: str) -> ShardHead:
    """A shard's head.

    Raises:
        CorruptOutput: it is missing, or not what was written.
        StorageError: the store failed.
    """
    return start_head_read(files, check)()


def _head(directory: str, about: bytes, sealed: bytes, check: str) -> ShardHead:
    found = chunks.unseal(sealed, chunks.CRC)
    if found is None or len(found) < chunks.BEYOND_CHUNKS:
        raise damaged(directory, "checksums that disagree with their own checksum")
    actual = hashlib.sha256(found.tobytes()).hexdigest()
    if check and actual != check:
        raise damaged(directory, f"checksums with SHA-256 {actual} instead of {check}")
    checksums, (offsets, metadata) = np.split(found, [-chunks.BEYOND_CHUNKS])
    if chunks.checksum(about) != metadata:
        raise damaged(directory, "a tokens/zarr.json that disagrees with its checksum")
    # Sound from here on: whatever does not fit now was written by something else.
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
        raise damaged(directory, f"another layout than this code reads ({error!r})") from error
    if expected != tree or len(checksums) != chunks.chunk_count(head.tokens):
        raise damaged(directory, "another layout than this code reads")
    return head


def wait(
    future: Any, directory: str, timeout_s: float = TIMEOUT_S, *, writing: bool = False
) -> Any:
    """The result of a TensorStore future, with errors in this project's terms.

    Args:
        future: of TensorStore.
        directory: what errors call the shard.
        timeout_s: longest wait.
        writing: whether the shard is being written, so that nothing finished can be damaged.

    Raises:
        CorruptOutput: what is stored is missing or cut short; never while writing.
        StorageError: the store failed or did not answer in `timeout_s` seconds.
    """
    try:
        return future.result(timeout=timeout_s)
    except TimeoutError as error:
        raise StoreUnavailable(
            f"{directory}: no answer from storage in {timeout_s:g} s; check it and run again"
        ) from error
    except (ValueError, OSError) as error:
        # TensorStore has one exception class; the status code is the message's first word.
        reason = " ".join(str(error).split(" [")[0].split())
        if writing and reason.startswith(_TAKEN):
            # In a bucket it may be ours: an answer was lost and the request sent again. Another
            # attempt, which has a directory of its own, is not in doubt.
            kind = StorageError if storage.is_local(directory) else StoreUnavailable
            raise kind(
                f"{directory}: the shard cannot be written: expected an empty directory, found "
                f"another shard ({reason}); delete the directory or choose another"
            ) from error
        if not writing and reason.startswith(_DAMAGE):
            raise damaged(directory, reason) from error
        kind = StoreUnavailable if reason.startswith(_UNAVAILABLE) else StorageError
        raise kind(f"{directory}: {reason}; check the storage, run again") from error


def damaged(directory: str, found: str) -> CorruptOutput:
    """The error for a shard in which something else was found than was written."""
    return CorruptOutput(
        f"{directory}: expected the shard written earlier, found {found}; "
        "rebuild the step that wrote it"
    )


def _failed(directory: str, error: OSError) -> StorageError:
    if isinstance(error, StorageError):
        return error
    return StoreUnavailable(f"{directory}: {error}; check the storage, run again")
