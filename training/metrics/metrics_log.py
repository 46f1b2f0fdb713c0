"""Writes `metrics.jsonl`, the only record of a run's metrics and events.

Each line is a JSON object: `kind` ("config", "began", "step", "evaluation", "sample" or the name of
an event), `time` (Unix) and fields; `training.metrics.recorder` defines those of a step. Process 0
encodes a line immediately and a thread appends it within a second, so the training loop never
blocks on a disk or store. A checkpoint holds no lines. It holds a `Segment` per attempt (the
attempt's directory and how many bytes of its log count), and is recorded after those bytes are
stored. Lines that an attempt wrote after the checkpoint that the next one resumed from stay in its
file but are not part of the run's history.

In a local directory the log is one file. An object store has no append, so bytes
[n, n + PART_BYTES) are the object `metrics.<n>.jsonl`, and only the last object is uploaded again
as it grows.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import InputError
from pipeline.store import storage
from pipeline.store.decode import json_line
from training.metrics.history import NAME, PART_BYTES, Segment, log_files, read_history

logger = logging.getLogger(__name__)

EVERY_SECONDS = 1.0
UPLOAD_SECONDS = 30.0
_COPY_LINES = 10_000


class MetricsLog:
    """Appends entries to the metrics log of one attempt.

    Args:
        directory: URL of a directory that contains no metrics log yet.
        every: seconds between two appends to the local file.
        upload_every: seconds between two uploads to an object store.

    Attributes:
        path: the local file; its last line may be incomplete.

    Raises:
        InputError: the directory contains a metrics log already.
    """

    def __init__(
        self, directory: str, every: float = EVERY_SECONDS, upload_every: float = UPLOAD_SECONDS
    ) -> None:
        if log_files(directory):
            raise InputError(
                f"{storage.join(directory, NAME)}: exists already; give every attempt its own name"
            )
        self._directory = directory
        self._every, self._upload_every = every, upload_every
        self._remote = not storage.is_local(directory)
        folder = tempfile.mkdtemp(prefix="ponente-") if self._remote else _make_local(directory)
        self.path = os.path.join(folder, NAME)
        # Unbuffered: after a failed write (disk full) the rest is known and can be retried.
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 - closed by the thread
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._pending: list[bytes] = []  # lines that are not yet in the file
        self._bytes = 0  # of all lines, pending ones included
        self._uploaded = 0
        self._next_upload = time.monotonic() + upload_every
        self._before: tuple[Segment, ...] = ()
        self._failing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Add an entry without blocking; `pipeline.store.decode.json_line` encodes it."""
        entry = {"kind": kind, "time": round(time.time(), 3), **fields}
        line = json_line(entry)
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

    def flush(self) -> None:
        """Store every entry written so far.

        Raises:
            OSError: the disk or the store failed; the entries are kept for a retry.
        """
        with self._writing:
            self._append()
            if self._remote:
                self._upload()
            else:
                os.fsync(self._file.fileno())

    def close(self, seconds: float) -> None:
        """Store pending entries and end the thread; abandon it after `seconds`."""
        self._closed.set()
        self._thread.join(seconds)
        if self._thread.is_alive() or self._failing:
            logger.warning("%s: the last metrics were not stored", self._directory)

    def remove_copy(self) -> None:
        """Delete the local file of a stored log, once trackers have read it; after `close`."""
        if self._remote and not self._failing and not self._thread.is_alive():
            shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)

    def _work(self) -> None:
        while not self._closed.wait(self._every):
            self._try(final=False)
        self._try(final=True)
        self._file.close()

    def _try(self, *, final: bool) -> None:
        due = final or time.monotonic() >= self._next_upload
        try:
            with self._writing:
                self._append()
                if self._remote and due:
                    self._upload()
            self._failing = False
        except Exception as error:  # noqa: BLE001 - only `flush` raises, before a checkpoint
            if not self._failing:
                logger.warning("%s: not written, will be retried: %s", self._directory, error)
            self._failing = True

    def _append(self) -> None:
        with self._lock:
            data, self._pending = b"".join(self._pending), []
        done = 0
        try:
            while done < len(data):
                done += self._file.write(data[done:])
        finally:  # an error keeps the unwritten rest at the front, in order
            if done < len(data):
                with self._lock:
                    self._pending.insert(0, data[done:])

    def _upload(self) -> None:
        self._next_upload = time.monotonic() + self._upload_every
        with open(self.path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            while self._uploaded < end:
                first = self._uploaded - self._uploaded % PART_BYTES
                file.seek(first)
                data = file.read(PART_BYTES)
                url = storage.join(self._directory, f"metrics.{first:015d}.jsonl")
                storage.write_atomic(url, data)
                self._uploaded = first + len(data)


def _make_local(directory: str) -> str:
    path = storage.local_path(directory)
    os.makedirs(path, exist_ok=True)
    return path
