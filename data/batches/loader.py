"""Batches for the training loop, prefetched by background threads.

Batch n of a run is the `batch_size` sequences from position first + n * batch_size; a process reads
only its own part of them. The only state is n: a loader that starts at batch k yields the same
batches as an uninterrupted one from batch k on, and any number of processes reads the same global
batches.

The fixed cost of a batch (some hundred numpy calls for its order, a hand-over between threads) is
amortised: rows are computed for thousands of positions at a time, and small batches are read in
groups. The first group is one batch and sizes double from there, so the first batch arrives early.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

import numpy as np

from pipeline.errors import InputError

GROUP_TOKENS = 1 << 19  # a group holds at most this many tokens, or one batch
LOCAL_THREADS = 8
REMOTE_THREADS = 16

_SPAN = 1 << 14  # most positions whose rows are computed together
_CLOSE_SECONDS = 5.0


class Sequences(Protocol):
    """The interface that a loader needs of a data set; `Dataset` implements it."""

    sequence_length: int
    sequences: int
    is_local: bool

    def rows(self, positions: np.ndarray) -> np.ndarray:
        """The row at each position: int64 (n,)."""
        ...

    def read_rows(self, rows: np.ndarray) -> np.ndarray:
        """The tokens of rows: int32 (n, sequence_length)."""
        ...


class Loader:
    """Iterator of int32 [len(rows), sequence_length], one item per global batch.

    Background threads prefetch within two limits: at most `prefetch_batches` batches and
    `prefetch_bytes` bytes of batches are read or in flight and not yet returned (at least one
    batch, even if it is larger than the limit). `next` raises a thread's error at the batch that
    could not be read, and raises it again on every later call. A batch may be a view of a buffer
    shared with its neighbours (2 MiB or one batch, whichever is more); copy a batch before keeping
    it for long. A context manager: leaving it closes the loader, not the data set.

    Args:
        dataset: the data set to read.
        batch_size: sequences in a global batch.
        rows: indices of the batch's sequences that this process reads, ascending; None for all.
            When several processes share a batch, each reads the rows of its own devices.
        start_batch: number of the first batch.
        stop_batch: number of the batch to end before; None never ends, since the order is endless.
        first: position of batch 0's first sequence.
        prefetch_batches: most batches to prefetch.
        prefetch_bytes: most bytes to prefetch (4 per token).
        threads: most reader threads; None: 8 for shards on local disks, 16 for object stores.
            With local shards only, the loader starts with one thread, which is fastest while the
            files are in the page cache, and adds one each time 8 consecutive reads were I/O-bound.

    Attributes:
        waited: total seconds that the consumer waited for batches.

    Raises:
        InputError: `rows` are not indices of the batch, or a size is out of range.
    """

    def __init__(
        self,
        dataset: Sequences,
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
        _check_batch(dataset, batch_size)
        mine = np.arange(batch_size) if rows is None else np.asarray(rows, np.int64)
        _check_rows(batch_size, mine)
        if threads is None:
            threads = LOCAL_THREADS if dataset.is_local else REMOTE_THREADS
        if min(prefetch_batches, prefetch_bytes, threads) < 1 or min(start_batch, first) < 0:
            raise InputError(
                f"{prefetch_batches=}, {prefetch_bytes=}, {threads=}, {start_batch=}, {first=}: "
                "expected start_batch and first of 0 or more and the others of 1 or more"
            )
        self.waited = 0.0
        self._dataset = dataset
        self._stop = stop_batch
        self._plan = _Plan(dataset, batch_size, first + mine)
        tokens = len(mine) * dataset.sequence_length
        self._limit = max(1, min(prefetch_batches, prefetch_bytes // (4 * tokens)))
        # A group leaves enough of the limit for the other threads to prefetch one of their own.
        self._largest = max(1, min(GROUP_TOKENS // tokens, self._limit // threads))
        self._ready: deque[np.ndarray] = deque()  # batches left of the group taken last
        self._groups: deque[_Group] = deque()  # groups in flight or read, in order, not taken yet
        self._handed = self._planned = start_batch  # next batch to return; next batch to read
        self._size = 1  # batches in the next group
        self._closed = False
        self._changed = threading.Condition(threading.Lock())
        self._planning = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._most_threads = threads
        self._slow_disk = SlowDisk()
        with self._changed:
            for _ in range(1 if dataset.is_local else threads):
                self._add_thread()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> np.ndarray:
        if self._closed:
            raise ValueError("this loader is closed; make a new one that starts at this batch")
        if not self._ready:
            if self._stop is not None and self._handed >= self._stop:
                raise StopIteration
            self._take_group()
        batch = self._ready.popleft()
        self._handed += 1
        if not self._ready:
            with self._changed:
                self._changed.notify_all()
        return batch

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop prefetched batches and end the threads.

        Waits up to 5 seconds for reads in flight. A thread whose read takes longer ends after that
        read; it is a daemon thread, so it does not delay the exit of the process.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._groups.clear()
        self._ready.clear()

    def _take_group(self) -> None:
        """Move the next group's batches to `_ready`, or raise its error when it has none left."""
        began = time.perf_counter()
        with self._changed:
            while not self._closed and not (self._groups and self._groups[0].done):
                self._changed.wait()
            if self._closed:
                raise ValueError("this loader was closed while `next` waited for a batch")
            group = self._groups[0]
            if group.error is None:  # a failed group stays first, so that `next` raises again
                self._groups.popleft()
        self.waited += time.perf_counter() - began
        self._ready.extend(group.batches)
        group.batches = []
        if not self._ready:
            assert group.error is not None, "a group has a batch or an error"
            raise group.error

    def _work(self) -> None:
        """Body of a thread: read group after group, until closed or at the end."""
        while (group := self._next_group()) is not None:
            began, worked = time.perf_counter(), time.thread_time()
            group.read(self._dataset)
            elapsed, worked = time.perf_counter() - began, time.thread_time() - worked
            with self._changed:
                group.done = True
                self._changed.notify_all()
                if self._slow_disk.seen(elapsed, worked):
                    self._add_thread()

    def _add_thread(self) -> None:
        """Start one more thread, unless closed or at the limit; the caller holds the lock."""
        if not self._closed and len(self._threads) < self._most_threads:
            name = f"loader-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            # Start it under the lock, since `close` joins every thread in the list.
            self._threads[-1].start()

    def _next_group(self) -> _Group | None:
        """The next group, once the limits allow it, or None; groups are planned in order."""
        with self._planning:
            size = self._size
            if self._stop is not None:
                size = min(size, self._stop - self._planned)
            if size < 1:
                return None
            self._size = min(2 * self._size, self._largest)
            with self._changed:
                while not self._closed and self._planned + size - self._handed > self._limit:
                    self._changed.wait()
                if self._closed:
                    return None
                group = _Group()
                self._groups.append(group)
                first, self._planned = self._planned, self._planned + size
            group.plan(self._plan, first, size)
            return group


class SlowDisk:
    """Detects I/O-bound reads: `ROW` reads in a row that took over `RATIO` times their CPU time.

    One slow read is not enough, since a busy machine also interrupts threads now and then.
    """

    ROW = 8
    RATIO = 2.0

    def __init__(self) -> None:
        self._row = 0

    def seen(self, elapsed: float, worked: float) -> bool:
        """Whether this read completes a row of `ROW` I/O-bound reads.

        Args:
            elapsed: wall seconds of the read.
            worked: CPU seconds of its thread.
        """
        self._row = self._row + 1 if elapsed > self.RATIO * worked else 0
        if self._row < self.ROW:
            return False
        self._row = 0
        return True


class _Group:
    """Batches that are read together; `error`, if any, belongs to the batch after `batches`."""

    def __init__(self) -> None:
        self.done = False
        self.batches: list[np.ndarray] = []
        self.error: BaseException | None = None
        self._rows = np.empty((0, 0), np.int64)

    def plan(self, plan: _Plan, first: int, size: int) -> None:
        """Compute the rows to read; keeps an error in `error`."""
        try:
            self._rows = plan.rows(first, size)
        except BaseException as error:  # noqa: BLE001 - raised by the consumer's thread in `next`
            self.error = error

    def read(self, dataset: Sequences) -> None:
        """Read the batches up to the first that fails; keeps its error in `error`."""
        size, share = self._rows.shape
        try:
            if self.error is None:
                tokens = dataset.read_rows(self._rows.reshape(-1))
                self.batches = list(tokens.reshape(size, share, -1))
        except BaseException as error:  # noqa: BLE001 - raised by the consumer's thread in `next`
            self.error = error
            if size > 1:
                self._read_each(dataset)

    def _read_each(self, dataset: Sequences) -> None:
        """Read batch by batch, to find the batch that fails."""
        self.error = None
        for rows in self._rows:
            try:
                self.batches.append(dataset.read_rows(rows))
            except BaseException as error:  # noqa: BLE001 - as above
                self.error = error
                return


class _Plan:
    """The rows of a process's part of every batch, computed for many batches at a time."""

    def __init__(self, dataset: Sequences, batch_size: int, mine: np.ndarray) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._mine = mine  # this process's positions in batch 0
        self._begin = self._end = 0
        self._rows = np.empty((0, len(mine)), np.int64)
        self._span = 1

    def rows(self, first: int, size: int) -> np.ndarray:
        """Rows of `size` batches from `first` on: int64 (size, share)."""
        if not self._begin <= first <= first + size <= self._end:
            # Spans grow from a few batches, so that the first batch does not wait for the order of
            # thousands of positions.
            self._span = min(8 * self._span, max(1, _SPAN // len(self._mine)))
            self._begin, self._end = first, first + max(size, self._span)
            batches = np.arange(self._begin, self._end, dtype=np.int64)
            positions = batches[:, None] * self._batch_size + self._mine
            self._rows = self._dataset.rows(positions.reshape(-1)).reshape(positions.shape)
        return self._rows[first - self._begin : first - self._begin + size]


def _check_batch(dataset: Sequences, batch_size: int) -> None:
    if not 1 <= batch_size <= dataset.sequences:
        raise InputError(
            f"batch_size={batch_size}: expected 1 to {dataset.sequences}, the sequences in the set "
            f"(sequence_length={dataset.sequence_length}); use a smaller batch or more documents"
        )


def _check_rows(batch_size: int, rows: np.ndarray) -> None:
    inside = len(rows) > 0 and rows[0] >= 0 and rows[-1] < batch_size
    if not inside or (np.diff(rows) <= 0).any():
        raise InputError(
            f"rows={rows.tolist()}: expected numbers from 0 to {batch_size - 1}, the sequences of "
            "a batch, ascending"
        )
