"""Files of a checkpoint, each written and read whole, and the index with their digests.

A local file is synced to the disk (fsync) before `write` returns. Buckets are accessed through
TensorStore, which retries.

`index.json` is written after all other files, so a directory without it is not a checkpoint. It has
the step, every array (axes, shape, dtype, chunks, CRC-32C and SHA-256 of every chunk), every small
file (size, SHA-256) and a digest of itself, so that a reader detects a missing, truncated, changed
or swapped file. All digests are of the bytes passed to the store: a save reads nothing back.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from pipeline.errors import CorruptOutput, InputError, StoreUnavailable
from pipeline.identity.fingerprint import digest
from pipeline.store import storage
from training.checkpoint.chunk_grid import CRC_BYTES, ChunkGrid, chunk_file

INDEX = "index.json"
PROGRESS = "progress.json"
FORMAT = 3

# Path inside the checkpoint, size in bytes, hex SHA-256.
Measured = tuple[str, int, str]


def with_digest(content: Any) -> bytes:
    """JSON of `content` with its digest, for `verify_digest`."""
    return json.dumps({"content": content, "sha256": digest(content)}).encode()


def verify_digest(url: str, what: str) -> tuple[Any, bytes]:
    """The content of the file at `url`, which `with_digest` encoded, and the file's bytes.

    Raises `CorruptOutput`, in which it is called `what`, where it is missing, truncated or changed.
    """
    try:
        encoded = storage.read_bytes(url)
        document = storage.parse_json(encoded)
        content = document["content"]
        sound = document["sha256"] == digest(content)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptOutput(f"{url}: {what} is missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptOutput(f"{url}: {what} is not readable: {error}") from error
    if not sound:
        raise CorruptOutput(f"{url}: {what} differs from its own digest")
    return content, encoded


def read_index(path: str) -> dict[str, Any]:
    """The index of the checkpoint at `path`.

    Raises:
        CorruptOutput: the index is missing, truncated or changed.
        InputError: another version of this code wrote it.
    """
    url = storage.join(path, INDEX)
    content, _ = verify_digest(url, "the checkpoint's index")
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise InputError(
            f"{url}: expected format {FORMAT}, found {found}; resume with the version that wrote "
            "the checkpoint"
        )
    return content


def measured(index: Mapping[str, Any]) -> Iterator[Measured]:
    """Path, size and SHA-256 of every file of the checkpoint except the index, as written."""
    yield from (tuple(file) for file in index["files"])
    for name, entry in index["leaves"].items():
        grid = ChunkGrid.of(entry)
        size = math.prod(grid.chunk) * entry["itemsize"] + CRC_BYTES
        for chunk, sha256 in zip(grid.every(), entry["sha256"], strict=True):
            yield chunk_file(name, chunk), size, sha256


def content_of(index: Mapping[str, Any]) -> str:
    """Content digest of the checkpoint: of its step and its arrays' digests, not of progress."""
    return digest({"step": index["step"], "leaves": index["leaves"]})


Bytes = bytes | memoryview
Item = TypeVar("Item")
Result = TypeVar("Result")


class Deadline:
    """The time limit that all operations of one save or restore share."""

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds = seconds
        self._what = what
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the deadline. Raises `StoreUnavailable` when it has passed."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise StoreUnavailable(
                f"{self._what}: not finished in {self._seconds:g} s; check the storage and the "
                "other processes, then run again"
            )
        return left


class Files:
    """The files of one checkpoint, on a local disk. Callers may use it from `threads` threads."""

    def __init__(self, path: str, deadline: Deadline) -> None:
        self.path = path
        self.threads = min(8, 2 + (os.cpu_count() or 1))
        self._deadline = deadline

    def write(self, name: str, *parts: Bytes) -> None:
        """Write a file of the concatenated `parts`. Raises `StorageError`."""
        url = storage.join(self.path, name)
        self._deadline.left()
        storage.with_local_retries(url, lambda: _write_local(url, parts))

    def read(self, name: str, *targets: np.ndarray) -> None:
        """Fill contiguous uint8 arrays with a file's content, one after the other.

        Raises `CorruptOutput` where there is no such file, or it has another size.
        """
        url = storage.join(self.path, name)
        self._deadline.left()
        try:
            found = storage.with_local_retries(
                url, lambda: _read_local(storage.local_path(url), targets)
            )
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            found = None
        self._check_size(name, found, targets)

    def check(self, name: str, size: int, sha256: str) -> bytes:
        """The content of a small file; `CorruptOutput` if it changed."""
        content = np.empty(size, np.uint8)
        self.read(name, content)
        if hashlib.sha256(content.data).hexdigest() != sha256:
            raise self.corrupt(name, "other content")
        return content.tobytes()

    def corrupt(self, name: str, found: str) -> CorruptOutput:
        """The error for a file whose content is not what was written."""
        return CorruptOutput(
            f"{self.path}/{name}: expected what was saved, found {found}; use an older checkpoint, "
            "or import the model again"
        )

    def _check_size(self, name: str, found: int | None, targets: Sequence[np.ndarray]) -> None:
        expected = sum(target.nbytes for target in targets)
        if found != expected:
            size = "no file" if found is None else f"{found:,} bytes instead of {expected:,}"
            raise self.corrupt(name, size)


def open_files(path: str, deadline: Deadline) -> Files:
    """The files of the checkpoint at `path`. Raises `InputError` for an unsupported store."""
    return Files(path, deadline) if storage.is_local(path) else _BucketFiles(path, deadline)


def in_parallel(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> list[Result]:
    """`function` of every item, in order; an error cancels the calls that have not started."""
    with ThreadPoolExecutor(threads, "checkpoint") as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _write_local(url: str, parts: Sequence[Bytes]) -> None:
    with storage.open_write(url) as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _read_local(path: str, targets: Sequence[np.ndarray]) -> int:
    """Fill the targets unless the file has another size; returns its size."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != sum(target.nbytes for target in targets):
            return size
        return sum(file.readinto(target.data) for target in targets)


class _BucketFiles(Files):
    def __init__(self, path: str, deadline: Deadline) -> None:
        from data.cache.shard_io import KeyValueStore, store_context, store_spec

        super().__init__(path, deadline)
        self.threads = 16
        # `writing` reports every failed request as an error of the store.
        self._bucket = KeyValueStore(
            path, store_spec(path), store_context(), deadline.left, writing=True
        )

    def write(self, name: str, *parts: Bytes) -> None:
        self._bucket.write(name, b"".join(parts))

    def read(self, name: str, *targets: np.ndarray) -> None:
        content = self._bucket.request(name)()
        self._check_size(name, None if content is None else len(content), targets)
        assert content is not None
        begin = 0
        for target in targets:
            target[:] = np.frombuffer(content, np.uint8, target.nbytes, begin)
            begin += target.nbytes
