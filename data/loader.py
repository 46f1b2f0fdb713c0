"""Batches for the training loop, read ahead of it.

Batch n of a run is the rows at positions n * batch_size and on; a process reads only its own
contiguous part of them. There is no state beside n: a loader that starts at batch k yields what an
uninterrupted one yields from there, and any number of processes sees the same global batches.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np

from data.order import Order, sequence_count
from data.token_array import TokenArray
from pipeline.errors import InputError


def batch_rows(order: Order, n: int, batch_size: int) -> np.ndarray:
    """The rows of global batch `n`: int64 (batch_size,)."""
    return order.rows(np.arange(n * batch_size, (n + 1) * batch_size, dtype=np.int64))


class Loader:
    """Iterator of int32 [batch_size / process_count, sequence_length], one item per global batch.

    Batches are read by background threads, `prefetch` of them at most in advance; an error in a
    thread is raised by `next`, at the batch it belongs to. A context manager: leaving it closes it.

    Args:
        tokens: the split's tokens.
        order: which row comes when; its rows must lie inside `tokens`.
        sequence_length: tokens in a row.
        batch_size: sequences in a global batch.
        process_index: of this process, 0 to process_count - 1.
        process_count: processes that share each batch.
        start_batch: number of the first batch.
        stop_batch: number of the batch to end before; None never ends, for an order has no end.
        prefetch: batches read in advance, also the number of threads.

    Attributes:
        waited: seconds in which the consumer waited for a batch, in all.
    """

    def __init__(
        self,
        tokens: TokenArray,
        order: Order,
        *,
        sequence_length: int,
        batch_size: int,
        process_index: int = 0,
        process_count: int = 1,
        start_batch: int = 0,
        stop_batch: int | None = None,
        prefetch: int = 2,
    ) -> None:
        _check_sizes(len(tokens), order.sequences, sequence_length, batch_size)
        _check_processes(batch_size, process_index, process_count)
        if prefetch < 1 or start_batch < 0:
            raise InputError(
                f"{prefetch=}, {start_batch=}: expected prefetch of 1 or more and start_batch of 0 "
                "or more"
            )
        self.waited = 0.0
        self._tokens, self._order = tokens, order
        self._sequence_length, self._batch_size = sequence_length, batch_size
        share = batch_size // process_count
        self._mine = slice(process_index * share, (process_index + 1) * share)
        self._next_batch, self._stop_batch = start_batch, stop_batch
        self._closed = False
        self._threads = ThreadPoolExecutor(prefetch, thread_name_prefix="loader")
        self._ahead: deque[Future[np.ndarray]] = deque()
        for _ in range(prefetch):
            self._read_ahead()

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> np.ndarray:
        if self._closed:
            raise ValueError("this loader is closed; make another one that starts at the batch")
        if not self._ahead:
            raise StopIteration
        began = time.perf_counter()
        try:
            batch = self._ahead[0].result()
        finally:
            self.waited += time.perf_counter() - began
        self._ahead.popleft()
        self._read_ahead()
        return batch

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop what was read ahead and end the threads; waits for reads under way."""
        self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def _read_ahead(self) -> None:
        if self._stop_batch is None or self._next_batch < self._stop_batch:
            self._ahead.append(self._threads.submit(self._read, self._next_batch))
            self._next_batch += 1

    def _read(self, n: int) -> np.ndarray:
        rows = batch_rows(self._order, n, self._batch_size)[self._mine]
        return self._tokens.read(rows * self._sequence_length, self._sequence_length)


def _check_sizes(tokens: int, sequences: int, sequence_length: int, batch_size: int) -> None:
    held = sequence_count(tokens, sequence_length)
    if sequences > held:
        raise InputError(
            f"the order has {sequences} sequences, but {tokens} tokens hold {held} of "
            f"sequence_length={sequence_length}; make the order with sequence_count"
        )
    if batch_size < 1 or sequences < batch_size:
        raise InputError(
            f"batch_size={batch_size}: expected 1 to {sequences}, the sequences in the set "
            f"({tokens} tokens, sequence_length={sequence_length}); use a smaller batch or more "
            "documents"
        )


def _check_processes(batch_size: int, process_index: int, process_count: int) -> None:
    if process_count < 1 or batch_size % process_count:
        raise InputError(
            f"batch_size={batch_size} is not divisible by {process_count} processes; use a "
            f"multiple of {process_count}"
        )
    if not 0 <= process_index < process_count:
        raise InputError(
            f"process_index={process_index}: expected 0 to {process_count - 1}; "
            "number the processes from 0"
        )
