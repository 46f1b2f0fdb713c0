"""The event log of a run: JSON lines, one file per run, written by the driver alone.

Everything that is shown while a run goes on (terminal view, plain lines) is drawn from these
events, so what the log says and what people saw are the same thing. A log that cannot be written
is said once and costs nobody a run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from typing import IO, Any

from pipeline.errors import PonenteError
from pipeline.store import local_storage, storage

Listener = Callable[[dict[str, Any]], None]

# An object store replaces the whole object, and takes about one write a second to it.
_UPLOAD_SECONDS = 10.0

logger = logging.getLogger("ponente")


class EventLog:
    """Appends events to `<prefix>/events/<run id>.jsonl` and passes them to listeners."""

    def __init__(self, prefix: str, run_id: str, listeners: list[Listener]) -> None:
        self.url = storage.join(prefix, "events", f"{run_id}.jsonl")
        self._listeners = listeners
        self._file: IO[str] | None = None
        self._pending: list[str] = []
        self._uploaded = time.monotonic()
        self._broken = False

    def listen(self, listener: Listener) -> None:
        """Pass events from now on to one more listener."""
        self._listeners.append(listener)

    def emit(self, event: dict[str, Any]) -> None:
        """Stamp an event with the time it happened (unless it has one), keep it, show it."""
        stamped = {"time": time.time(), **event}
        self._keep(json.dumps(stamped, default=str) + "\n")
        for listener in list(self._listeners):
            try:
                listener(stamped)
            except Exception as error:  # noqa: BLE001 - whoever shows a run must not fail it
                self._listeners.remove(listener)
                self._warn_others(listener, error)

    def _warn_others(self, listener: Listener, error: Exception) -> None:
        name = type(listener).__name__
        logger.warning("%s stopped showing this run: %s: %s", name, type(error).__name__, error)
        self.emit({"event": "listener_lost", "listener": name, "cause": str(error)})

    def _keep(self, line: str) -> None:
        self._pending.append(line)
        try:
            if storage.is_local(self.url):
                self._append()
            elif time.monotonic() - self._uploaded > _UPLOAD_SECONDS:
                self._upload()
        except (OSError, PonenteError) as error:
            self._complain(error)

    def _append(self) -> None:
        if self._file is None:
            path = storage.local_path(self.url)
            local_storage.make_directory(os.path.dirname(path))
            self._file = open(path, "a")  # noqa: SIM115 - open as long as the log is
        try:
            self._file.write("".join(self._pending))
            self._file.flush()
        except OSError:
            # Part of it may be written: an empty line ends that, and all of it comes again.
            file, self._file = self._file, None
            self._pending.insert(0, "\n")
            with contextlib.suppress(OSError):
                file.close()
            raise
        self._pending.clear()

    def _upload(self) -> None:
        self._uploaded = time.monotonic()
        storage.write_atomic(self.url, "".join(self._pending).encode())

    def _complain(self, error: Exception) -> None:
        if not self._broken:
            logger.warning("%s: events cannot be kept: %s", self.url, error)
        self._broken = True

    def keep_diff(self, diff: str) -> str:
        """Keep what the run's code has uncommitted; its place in the store, empty for none."""
        url = self.url.removesuffix(".jsonl") + ".diff"
        if not diff:
            return ""
        try:
            storage.write_atomic(url, diff.encode(errors="surrogateescape"))
        except (OSError, PonenteError) as error:
            self._complain(error)
            return ""
        return "/".join(url.rsplit("/", 2)[1:])

    def close(self) -> None:
        """Keep what is not kept yet."""
        try:
            if self._pending and not storage.is_local(self.url):
                self._upload()
        except (OSError, PonenteError) as error:
            self._complain(error)
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
