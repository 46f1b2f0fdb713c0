"""Writes `metrics.jsonl`, the only record of a run's metrics, events and times.

Each line is a JSON object: `kind` ("config", "began", "time", "step", "evaluation", "sample" or the
name of an event), `time` (Unix) and fields; `training.metrics.recorder` defines those of a step,
`training.metrics.attempts` those of a time. Process 0 encodes a line immediately and a thread
appends it within a second, so the training loop never blocks on a disk or store. A checkpoint holds
no lines. It holds a `Segment` per attempt (the attempt's directory and how many bytes of its log
count), and is recorded after those bytes are stored. Lines that an attempt wrote after the
checkpoint that the next one resumed from stay in its file but are not part of the run's history.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.errors import InputError
from pipeline.store import storage
from pipeline.store.append import Appender
from pipeline.store.decode import json_line
from training.metrics.history import NAME, Segment, log_files, read_history

logger = logging.getLogger(__name__)

EVERY_SECONDS = 1.0
TIMES_SECONDS = 10.0
_COPY_LINES = 10_000


class MetricsLog:
    """Appends entries to the metrics log of one attempt.

    Args:
        directory: URL of a directory that contains no metrics log yet.
        times: fields of the row of kind "time" that the thread writes every ten seconds.
        every: seconds between two appends.

    Raises:
        InputError: the directory contains a metrics log already.
    """

    def __init__(
        self,
        directory: str,
        times: Callable[[], Mapping[str, Any]] | None = None,
        every: float = EVERY_SECONDS,
    ) -> None:
        self._url = storage.join(directory, NAME)
        if log_files(directory):
            raise InputError(f"{self._url}: exists already; give every attempt its own name")
        self._directory, self._times, self._every = directory, times, every
        self._file = Appender(self._url).__enter__()
        self._lock, self._appending = threading.Lock(), threading.Lock()
        self._pending: list[bytes] = []  # lines that are not yet in the file
        self._bytes = 0  # of all lines, pending ones included
        self._before: tuple[Segment, ...] = ()
        self._failing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    @property
    def path(self) -> str:
        """The local file; its last line may be incomplete."""
        return self._file.path

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Add an entry without blocking; `pipeline.store.decode.json_line` encodes it."""
        line = json_line({"kind": kind, "time": round(time.time(), 3), **fields})
        with self._lock:
            self._pending.append(line)
            self._bytes += len(line)

    def resume(self, history: Sequence[Segment]) -> None:
        """Set the run's history so far, which earlier attempts wrote."""
        self._before = tuple(history)

    def copy(self, history: Sequence[Segment]) -> None:
        """Copy the history of another run, so that this run does not depend on its files."""
        for entry in read_history(history):
            self.write(entry.pop("kind"), entry)
            if len(self._pending) > _COPY_LINES:
                self.flush()

    @property
    def history(self) -> tuple[Segment, ...]:
        """The run's history until now; `flush` stores the part that is still pending."""
        return (*self._before, (self._directory, self._bytes))

    def append(self, *, durable: bool = False) -> None:
        """Append every entry written so far to the local file; if `durable`, store it.

        An `OSError` of the disk or the store keeps the entries for the next call.
        """
        with self._appending:
            with self._lock:
                data, self._pending = b"".join(self._pending), []
            self._file.write(data)
            if durable:
                self._file.flush()

    def flush(self) -> None:
        """Store every entry written so far, as `append` does."""
        self.append(durable=True)

    def close(self, seconds: float) -> None:
        """Store pending entries and end the thread; abandon it after `seconds`."""
        self._closed.set()
        self._thread.join(seconds)
        if self._thread.is_alive() or self._failing:
            logger.warning("%s: the last metrics were not stored", self._directory)

    def _work(self) -> None:
        next_times = time.monotonic() + TIMES_SECONDS
        while not self._closed.wait(self._every):
            if self._times is not None and time.monotonic() >= next_times:
                self.write("time", self._times())
                next_times += TIMES_SECONDS
            self._try()
        self._try()
        self._file.close()

    def _try(self) -> None:
        try:
            self.append()
            self._failing = False
        except Exception as error:  # noqa: BLE001 - only `flush` raises, before a checkpoint
            if not self._failing:
                logger.warning("%s: not written, will be retried: %s", self._url, error)
            self._failing = True
