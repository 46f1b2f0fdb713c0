"""Batches for the training loop, read ahead of it.

Batch n of a run is the sequences at positions first + n * batch_size and on; a process reads only
its own contiguous part of them. There is no state beside n: a loader that starts at batch k yields
what an uninterrupted one yields from there, and any number of processes sees the same global
batches.

What a batch costs beside its tokens (an order of some hundred numpy calls, a hand-over between
threads) is shared by many: the rows of some thousand positions are worked out at a time, and small
batches are read in groups. Groups begin with one batch and double, so the first is there at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

import numpy as np

from pipeline.errors import InputError

GROUP_TOKENS = 1 << 19  # a batch of more is read alone
LOCAL_THREADS = 8
REMOTE_THREADS = 16

_SPAN = 1 << 14  # positions whose rows are worked out together, at most
_CLOSE_SECONDS = 5.0


class Sequences(Protocol):
    """What a loader asks of a data set; `Dataset` is one."""

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

    Background threads read ahead, within both limits: at most `prefetch_batches` batches and
    `prefetch_bytes` bytes of batches are read or being read and not yet handed out (one batch,
    where a single one is larger than the limit). An error in a thread is raised by `next`, at the
    batch it belongs to and again when asked again. A batch may share memory with its neighbours
    (2 MiB or one batch, whichever is more); copy what is kept for long. A context manager: leaving
    it closes the loader, not the data set.

    Args:
        dataset: what to read.
        batch_size: sequences in a global batch.
        rows: numbers of the batch's sequences that are read here, ascending; by default all of
            them. Where several processes share a batch, each reads what its devices hold.
        start_batch: number of the first batch.
        stop_batch: number of the batch to end before; None never ends, for an order has no end.
        first: position of batch 0's first sequence.
        prefetch_batches: limit of batches read in advance.
        prefetch_bytes: limit of their bytes (4 for each token).
        threads: that read, at most; None: 8 for shards on local disks, 16 for object stores.
            Where all shards are local there is one at first, which is fastest while the files are
            in memory, and one more whenever reads have waited for the disk again and again.

    Attributes:
        waited: seconds in which the consumer waited for a batch, in all.

    Raises:
        InputError: rows are not of the batch, or a size cannot be.
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
        # No group so large that it alone would keep the other threads from reading ahead.
        self._largest = max(1, min(GROUP_TOKENS // tokens, self._limit // threads))
        self._ready: deque[np.ndarray] = deque()  # what is left of the group taken last
        self._groups: deque[_Group] = deque()  # begun and not taken, in order
        self._handed = self._planned = start_batch  # batches before these were handed out, begun
        self._size = 1  # batches of the next group
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
            raise ValueError("this loader is closed; make another one that starts at the batch")
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
        """Drop what was read ahead and end the threads.

        Waits for reads under way, some seconds at most: a thread that a store keeps waiting for
        longer ends with its read, and never holds up the end of the process.
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
        """Move the next group's batches to `_ready`, or raise the error they ended with."""
        began = time.perf_counter()
        with self._changed:
            while not self._closed and not (self._groups and self._groups[0].done):
                self._changed.wait()
            if self._closed:
                raise ValueError("this loader was closed while a batch was waited for")
            group = self._groups[0]
            if group.error is None:
                self._groups.popleft()
        self.waited += time.perf_counter() - began
        self._ready.extend(group.batches)
        group.batches = []
        if not self._ready:
            assert group.error is not None, "a group has a batch or an error"
            raise group.error

    def _work(self) -> None:
        """One thread: read group after group, until closed or at the end."""
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
        """Start one more, if there may be one; the lock is held."""
        if not self._closed and len(self._threads) < self._most_threads:
            name = f"loader-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            # With the lock held: a thread that `close` finds in the list has been started.
            self._threads[-1].start()

    def _next_group(self) -> _Group | None:
        """The next group, once there is room for it; groups are begun in order."""
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
    """Tells reads that wait for a disk from reads that a busy machine interrupts now and then."""

    ROW = 8  # of so many reads each one, in a row,
    RATIO = 2.0  # took so many times its own processor time

    def __init__(self) -> None:
        self._row = 0

    def seen(self, elapsed: float, worked: float) -> bool:
        """Whether this read, of so many seconds, completes another row of reads that waited."""
        self._row = self._row + 1 if elapsed > self.RATIO * worked else 0
        if self._row < self.ROW:
            return False
        self._row = 0
        return True


class _Group:
    """Batches that are read together; `batches` come before `error`."""

    def __init__(self) -> None:
        self.done = False
        self.batches: list[np.ndarray] = []
        self.error: BaseException | None = None
        self._rows = np.empty((0, 0), np.int64)

    def plan(self, plan: _Plan, first: int, size: int) -> None:
        """Say what to read; never raises."""
        try:
            self._rows = plan.rows(first, size)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that asks for the batch
            self.error = error

    def read(self, dataset: Sequences) -> None:
        """Read the batches up to the first that cannot be; never raises."""
        size, share = self._rows.shape
        try:
            if self.error is None:
                tokens = dataset.read_rows(self._rows.reshape(-1))
                self.batches = list(tokens.reshape(size, share, -1))
        except BaseException as error:  # noqa: BLE001 - raised by the thread that asks for the batch
            self.error = error
            if size > 1:
                self._read_each(dataset)

    def _read_each(self, dataset: Sequences) -> None:
        """Find the batch an error belongs to."""
        self.error = None
        for rows in self._rows:
            try:
                self.batches.append(dataset.read_rows(rows))
            except BaseException as error:  # noqa: BLE001 - as above
                self.error = error
                return


class _Plan:
    """The rows of a process's part of every batch, worked out for many batches at a time."""

    def __init__(self, dataset: Sequences, batch_size: int, mine: np.ndarray) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._mine = mine  # in batch 0
        self._begin = self._end = 0
        self._rows = np.empty((0, len(mine)), np.int64)
        self._span = 1

    def rows(self, first: int, size: int) -> np.ndarray:
        """Rows of batches `first` and on: int64 (size, share)."""
        if not self._begin <= first <= first + size <= self._end:
            # Spans grow with the groups, so that the first batch does not wait for the order of
            # thousands.
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
