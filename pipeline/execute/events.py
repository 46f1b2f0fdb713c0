"""The event log of a run: JSON lines, one log per run, written by the driver alone.

Everything displayed during a run (terminal view, plain lines) comes from these events, so the log
and the screen agree. Neither a log that cannot be written nor a listener that raises fails the run:
each is reported once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from pipeline.errors import PonenteError
from pipeline.store import storage
from pipeline.store.append import Appender
from pipeline.store.decode import json_line

Listener = Callable[[dict[str, Any]], None]

_PROGRESS_SECONDS = 5.0  # between two progress lines of one step in the log

logger = logging.getLogger("ponente")


class EventLog:
    """Appends events to the log `<prefix>/events/<run id>.jsonl` and passes them to listeners.

    On an object store the log is a directory of parts, see `append`.
    """

    def __init__(self, prefix: str, run_id: str, listeners: list[Listener]) -> None:
        self.run_id = run_id
        self.url = storage.join(prefix, "events", f"{run_id}.jsonl")
        self._listeners = listeners
        self._file = Appender(self.url)
        # By key: the latest progress that is not written yet, and when progress was last written.
        self._latest: dict[str, bytes] = {}
        self._kept: dict[str, float] = {}
        self._broken = False
        self._lock = threading.RLock()  # threads of the store's clients report retries

    def listen(self, listener: Listener) -> None:
        """Pass events from now on to one more listener."""
        self._listeners.append(listener)

    def emit(self, event: dict[str, Any]) -> None:
        """Write an event to the log and pass it to the listeners; adds the time if it has none."""
        stamped = {"time": time.time(), **event}
        with self._lock:
            if event["event"] != "output":  # which is in the step's log
                self._keep(stamped)
            for listener in list(self._listeners):
                try:
                    listener(stamped)
                except Exception as error:  # noqa: BLE001 - a display must not fail a run
                    self._listeners.remove(listener)
                    self._warn_others(listener, error)

    def _warn_others(self, listener: Listener, error: Exception) -> None:
        name = type(listener).__name__
        logger.warning("%s stopped showing this run: %s: %s", name, type(error).__name__, error)
        self.emit({"event": "listener_lost", "listener": name, "cause": str(error)})

    def _keep(self, event: dict[str, Any]) -> None:
        line, key = json_line(event), event.get("key", "")
        now = time.monotonic()
        if event["event"] == "progress":
            if now - self._kept.get(key, -_PROGRESS_SECONDS) < _PROGRESS_SECONDS:
                self._latest[key] = line
                return
            self._kept[key] = now
            self._latest.pop(key, None)
        self._write(self._latest.pop(key, b"") + line)

    def _write(self, lines: bytes) -> None:
        try:
            self._file.write(lines)
        except OSError as error:
            if not self._broken:
                logger.warning("%s: events cannot be written: %s", self.url, error)
            self._broken = True

    @property
    def file(self) -> str:
        """The local file that events are written to."""
        return self._file.path

    def keep_diff(self, diff: str) -> str:
        """Write the diff of uncommitted code; returns its path in the store, empty for none."""
        url = self.url.removesuffix(".jsonl") + ".diff"
        if not diff:
            return ""
        try:
            storage.write_atomic(url, diff.encode(errors="surrogateescape"))
        except (OSError, PonenteError) as error:
            logger.warning("%s: the diff of uncommitted code cannot be written: %s", url, error)
            return ""
        return "/".join(url.rsplit("/", 2)[1:])

    def close(self) -> None:
        """Write pending events and close the log."""
        self._write(b"".join(self._latest.values()))
        self._latest.clear()
        self._file.close()
