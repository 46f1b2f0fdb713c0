"""Files of a checkpoint, each written and read whole, on a local disk or in a bucket.

A local file is synced to the disk (fsync) before `write` returns. Buckets are accessed through
TensorStore, which retries. This module checks sizes only: callers compare the checksums.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from pipeline.errors import CorruptOutput, StoreUnavailable
from pipeline.store import storage

Bytes = bytes | memoryview
Item = TypeVar("Item")
Result = TypeVar("Result")

_NOT_FOUND = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


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
        self._path = path
        self._deadline = deadline
        self.threads = min(8, 2 + (os.cpu_count() or 1))

    def write(self, name: str, *parts: Bytes) -> None:
        """Write a file of the concatenated `parts`. Raises `StorageError`."""
        url = storage.join(self._path, name)
        self._deadline.left()
        storage.with_local_retries(url, lambda: _write_local(url, parts))

    def read(self, name: str, *targets: np.ndarray) -> None:
        """Fill contiguous uint8 arrays with a file's content, one after the other.

        Raises:
            CorruptOutput: there is no such file, or it has another size.
            StorageError: the store failed.
        """
        url = storage.join(self._path, name)
        self._deadline.left()
        try:
            found = storage.with_local_retries(
                url, lambda: _read_local(storage.local_path(url), targets)
            )
        except _NOT_FOUND as error:
            raise corrupt(self._path, name, "no file") from error
        expected = sum(target.nbytes for target in targets)
        if found != expected:
            raise corrupt(self._path, name, f"{found:,} bytes instead of {expected:,}")


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


def corrupt(path: str, name: str, found: str) -> CorruptOutput:
    """The error for a file whose content is not what was written."""
    return CorruptOutput(
        f"{path}/{name}: expected what was saved, found {found}; use an older checkpoint, or "
        "import the model again"
    )


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
        from data.cache.shard_io import Bucket, store_context, store_spec

        super().__init__(path, deadline)
        self.threads = 16
        # `writing` reports every failed request as an error of the store.
        self._bucket = Bucket(path, store_spec(path), store_context(), deadline.left, writing=True)

    def write(self, name: str, *parts: Bytes) -> None:
        self._bucket.write(name, b"".join(parts))

    def read(self, name: str, *targets: np.ndarray) -> None:
        content, expected = self._bucket.request(name)(), sum(target.nbytes for target in targets)
        if content is None:
            raise corrupt(self._path, name, "no file")
        if len(content) != expected:
            raise corrupt(self._path, name, f"{len(content):,} bytes instead of {expected:,}")
        begin = 0
        for target in targets:
            target[:] = np.frombuffer(content, np.uint8, target.nbytes, begin)
            begin += target.nbytes
