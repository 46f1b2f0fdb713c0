"""`metrics.jsonl`: what happened in a run, written once; the only history of it.

A JSON object a line: `kind` ("config", "began", "step", "evaluation", "sample" or the name of an
event), `time` (Unix) and fields; those of a step are in `training.metrics.recorder`. Process 0
encodes a line at once and a thread appends it within a second, so the loop waits for no disk and no
store. A checkpoint holds no lines: it holds how many bytes of which attempts' files the run had
written (a `Segment` each), and is recorded after those bytes are stored. What an attempt wrote
after the checkpoint that the next one resumed from stays in its file and is in no history.

A local directory has one file. An object store has no append: there bytes [n, n + PART_BYTES) are
the object `metrics.<n>.jsonl`, and only the last object is uploaded again while it grows.
"""

from __future__ import annotations

import json
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
from training.metrics.history import NAME, Segment, log_files, read_history

logger = logging.getLogger(__name__)

PART_BYTES = 256 << 10
EVERY_SECONDS = 1.0
UPLOAD_SECONDS = 30.0
_COPY_LINES = 10_000


class MetricsLog:
    """Appends entries to the metrics log of one attempt.

    Args:
        directory: URL; no attempt has written a metrics log there.
        every: seconds between two appends to the local file.
        upload_every: seconds between two uploads to an object store.

    Attributes:
        path: the local file, whole lines but for the last.

    Raises:
        InputError: there is a metrics log already.
    """

    def __init__(
        self, directory: str, every: float = EVERY_SECONDS, upload_every: float = UPLOAD_SECONDS
    ) -> None:
        if log_files(directory):
            raise InputError(
                f"{storage.join(directory, NAME)}: exists already; give every run its own attempt"
            )
        self._directory = directory
        self._every, self._upload_every = every, upload_every
        self._remote = not storage.is_local(directory)
        folder = tempfile.mkdtemp(prefix="ponente-") if self._remote else _made(directory)
        self.path = os.path.join(folder, NAME)
        # Unbuffered: what a full disk did not take must be known, to be written again.
        self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 - closed by the thread
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._pending: list[bytes] = []  # lines that are not yet in the file
        self._bytes = 0  # encoded in all
        self._uploaded = 0
        self._next_upload = time.monotonic() + upload_every
        self._before: tuple[Segment, ...] = ()
        self._failing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Add an entry; returns at once. What JSON has no type for is written as text."""
        entry = {"kind": kind, "time": round(time.time(), 3), **fields}
        line = json.dumps(entry, default=str).encode() + b"\n"
        with self._lock:
            self._pending.append(line)
            self._bytes += len(line)

    def resume(self, history: Sequence[Segment]) -> None:
        """The history of this run so far, in logs of earlier attempts."""
        self._before = tuple(history)

    def copy(self, history: Sequence[Segment]) -> None:
        """Begin with the history of another run, whose files this one will not depend on."""
        for entry in read_history(history):
            self.write(entry.pop("kind"), entry)
            if len(self._pending) > _COPY_LINES:
                self.flush()

    @property
    def history(self) -> tuple[Segment, ...]:
        """The run's history until now, of which `flush` stores the part that is not stored yet."""
        return (*self._before, (self._directory, self._bytes))

    def flush(self) -> None:
        """Return when every entry so far is stored.

        Raises:
            OSError: the disk or the store failed; the entries are kept for the next try.
        """
        with self._writing:
            self._append()
            if self._remote:
                self._upload()
            else:
                os.fsync(self._file.fileno())

    def close(self, seconds: float) -> None:
        """Store what is left and end the thread, or leave it behind after so long."""
        self._closed.set()
        self._thread.join(seconds)
        if self._thread.is_alive() or self._failing:
            logger.warning("%s: the last metrics were not stored", self._directory)

    def _work(self) -> None:
        while not self._closed.wait(self._every):
            self._try(final=False)
        self._try(final=True)
        self._file.close()
        if self._remote and not self._failing:
            shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)

    def _try(self, *, final: bool) -> None:
        due = final or time.monotonic() >= self._next_upload
        try:
            with self._writing:
                self._append()
                if self._remote and due:
                    self._upload()
            self._failing = False
        except Exception as error:  # noqa: BLE001 - a checkpoint's `flush` raises it, the loop not
            if not self._failing:
                logger.warning("%s: not written, tried again later: %s", self._directory, error)
            self._failing = True

    def _append(self) -> None:
        with self._lock:
            data, self._pending = b"".join(self._pending), []
        done = 0
        try:
            while done < len(data):
                done += self._file.write(data[done:])
        finally:
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


def _made(directory: str) -> str:
    path = storage.local_path(directory)
    os.makedirs(path, exist_ok=True)
    return path
