"""The event log of a run: JSON lines, one file per run, written by the driver alone.

Everything that is shown while a run goes on (terminal view, plain lines) is drawn from these
events, so what the log says and what people saw are the same thing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from pipeline import storage

Listener = Callable[[dict[str, Any]], None]


class EventLog:
    """Appends events to `<prefix>/events/<run id>.jsonl` and passes them to listeners."""

    def __init__(self, prefix: str, run_id: str, listeners: list[Listener]) -> None:
        self.url = storage.join(prefix, "events", f"{run_id}.jsonl")
        self._listeners = listeners

    def emit(self, event: dict[str, Any]) -> None:
        """Stamp an event with the time it happened (unless it has one), keep it, show it."""
        stamped = {"time": time.time(), **event}
        storage.append_line(self.url, json.dumps(stamped, default=str))
        for listener in self._listeners:
            listener(stamped)
