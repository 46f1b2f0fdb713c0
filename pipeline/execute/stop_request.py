"""A request to stop a run, written to its store: it reaches a driver that users cannot signal.

The request is a small object next to the run's event log. The driver checks for it every
`LOOK_SECONDS` and stops as for Ctrl-C: shards in flight are finished, and training saves a
checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator

from pipeline.errors import PonenteError
from pipeline.store import storage

LOOK_SECONDS = 10.0  # each check is one request to an object store


def _url(prefix: str, run_id: str) -> str:
    return storage.join(prefix, "events", f"{run_id}.stop")


def request_stop(prefix: str, run_id: str) -> None:
    storage.create(_url(prefix, run_id), json.dumps({"time": time.time()}).encode())


@contextlib.contextmanager
def stop_on_request(prefix: str, run_id: str, stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` once, from another thread, if a request appears while the block runs."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_SECONDS):
            # A store that does not answer is checked again at the next interval.
            with contextlib.suppress(PonenteError, OSError):
                if storage.exists(_url(prefix, run_id)):
                    stop()
                    return

    thread = threading.Thread(target=watch, name="stop requests", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
