"""Batches for the training loop, prefetched by background threads.

Batch n of a run is the `batch_size` sequences from position first + n * batch_size; a process reads
only its own part of them. The only state is n. Small batches are read in groups, which amortises
the fixed cost of a read (some hundred numpy calls); the first one alone, so that it arrives early.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from concurrent.futures import CancelledError, Future, InvalidStateError
from queue import SimpleQueue

import numpy as np

from data.batches.dataset import Dataset
from pipeline.errors import InputError

GROUP_TOKENS = 1 << 19  # a group holds at most this many tokens, or one batch
LOCAL_THREADS = 8
REMOTE_THREADS = 16

_CLOSE_SECONDS = 5.0

# The batches of a group: their numbers and what they are read into.
_Group = list[tuple[int, Future[np.ndarray]]]


class Loader:
    """Iterator of int32 [len(rows), sequence_length], one item per global batch.

    At most `prefetch_batches` batches and `prefetch_bytes` bytes of batches are read or in flight
    and not yet returned (but always one batch). `next` raises a thread's error at the batch that
    could not be read, on every call. A batch may be a view of a buffer shared with its neighbours
    (2 MiB or one batch, whichever is more): copy what you keep for long. A context manager: leaving
    it closes the loader, not the data set.

    Args:
        rows: indices of the batch's sequences that this process reads, ascending; None for all.
        stop_batch: number of the batch to end before; None never ends, since the order is endless.
        threads: reader threads; None: 8 for shards on local disks, 16 for object stores.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        rows: np.ndarray | None = None,
        start_batch: int = 0,
        stop_batch: int | None = None,
        first: int = 0,
        prefetch_batches: int = 256,
        prefetch_bytes: int = 64 << 20,
        threads: int | None = None,
    ) -> None:
        if not 1 <= batch_size <= dataset.sequences:
            raise InputError(
                f"batch_size={batch_size}: expected 1 to {dataset.sequences}, the sequences in the "
                f"set (sequence_length={dataset.sequence_length}); use a smaller batch or more "
                "documents"
            )
        mine = np.arange(batch_size) if rows is None else np.asarray(rows, np.int64)
        assert (np.diff(mine, prepend=-1) > 0).all()
        assert 0 < len(mine) <= mine[-1] + 1 <= batch_size
        if threads is None:
            threads = LOCAL_THREADS if dataset.is_local else REMOTE_THREADS
        self._dataset = dataset
        self._batch_size = batch_size
        self._mine = first + mine  # this process's positions in batch 0
        self._stop = stop_batch
        tokens = len(mine) * dataset.sequence_length
        self._limit = max(1, min(prefetch_batches, prefetch_bytes // (4 * tokens)))
        # A group leaves enough of the limit for the other threads to prefetch one of their own.
        self._group = max(1, min(GROUP_TOKENS // tokens, self._limit // threads))
        self._next = start_batch  # the next batch to request
        self._requested: deque[Future[np.ndarray]] = deque()  # not yet returned, in order
        self._groups: SimpleQueue[_Group | None] = SimpleQueue()
        self._closed = False
        # Not a ThreadPoolExecutor: its threads delay the exit of the process while a read hangs.
        self._threads = [
            threading.Thread(target=self._work, name=f"loader-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        self._request(1)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> np.ndarray:
        if self._closed:
            raise ValueError("this loader is closed; make a new one that starts at this batch")
        if not self._requested:
            raise StopIteration
        try:
            batch = self._requested[0].result()
        except CancelledError:
            raise ValueError("this loader was closed while `next` waited for a batch") from None
        self._requested.popleft()
        self._request(self._limit)
        return batch

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop prefetched batches and end the threads; waits up to 5 s for reads in flight."""
        self._closed = True
        while self._requested:
            self._requested.pop().cancel()
        for _ in self._threads:
            self._groups.put(None)
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _request(self, most: int) -> None:
        """Request groups until `most` batches, or the last one, are requested."""
        while True:
            size = min(self._group, most)
            if self._stop is not None:
                size = min(size, self._stop - self._next)
            if size < 1 or len(self._requested) + size > most:
                return
            group: _Group = [(self._next + n, Future()) for n in range(size)]
            self._requested.extend(future for _, future in group)
            self._groups.put(group)
            self._next += size

    def _work(self) -> None:
        while (group := self._groups.get()) is not None:
            self._read(group)

    def _read(self, group: _Group) -> None:
        group = [(number, future) for number, future in group if not future.cancelled()]
        if not group:
            return
        numbers = np.array([number for number, _ in group], np.int64)
        positions = numbers[:, None] * self._batch_size + self._mine
        try:
            batches = np.split(self._dataset.read(positions.reshape(-1)), len(group))
        except BaseException as error:  # noqa: BLE001 - raised by the consumer in `next`
            if len(group) > 1:
                for batch in group:  # to find the one that fails
                    self._read([batch])
                return
            with contextlib.suppress(InvalidStateError):
                group[0][1].set_exception(error)
            return
        for (_, future), batch in zip(group, batches, strict=True):
            # A future is pending until now, so that `close` can have cancelled it.
            with contextlib.suppress(InvalidStateError):
                future.set_result(batch)
