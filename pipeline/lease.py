"""A lease on a step: so that two executors do not do the same work twice.

Correctness does not rest on it: publishing is a conditional create (see `manifest.py`). A lease is
a numbered object, `leases/000007.json`, created if absent, so of two takers one wins and the number
fences the loser. The holder counts heartbeats in `000007.beat`; `000007.done` releases it.

No wall clock is compared. A holder is dead when it lived on this host and its process is gone
(noticed at once), or when its heartbeat count did not change for `STALE_SECONDS` of the observer's
own monotonic clock.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from pipeline import storage

BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
_DIRECTORY = "leases"


def _read_text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _process_start(pid: int) -> str:
    """When a process of this host started, in clock ticks since boot; empty when it is gone."""
    stat = _read_text(f"/proc/{pid}/stat")
    # The command name is in parentheses and may hold spaces; state and times follow it.
    fields = stat.rpartition(")")[2].split()
    return "" if not fields or fields[0] in "ZX" else fields[19]


def _this_host() -> str:
    """Name, boot and process-id namespace: equal only where a pid means the same process."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {_read_text('/proc/sys/kernel/random/boot_id')} {namespace}"


def _this_owner() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": _this_host(), "pid": pid, "process_start": _process_start(pid)}


class Lease:
    """A held lease; beats in a thread until `release`."""

    def __init__(self, root: str, number: int) -> None:
        self.number = number
        self._base = storage.join(root, _DIRECTORY, f"{number:06d}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"lease-{number}", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(BEAT_SECONDS):
            count += 1
            try:
                storage.write_atomic(self._base + ".beat", str(count).encode())
            except OSError:
                # A missed beat only brings a takeover nearer, which publishing survives.
                continue

    def release(self) -> None:
        """Stop beating and let the next taker in at once."""
        self._stop.set()
        self._thread.join()
        storage.create(self._base + ".done", b"")


class _Observer:
    """Watches one foreign lease by this process's monotonic clock."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._seen: bytes | None = None
        self._since = time.monotonic()

    def free(self) -> bool:
        """Whether the lease is released, its owner dead, or its heartbeat silent for too long."""
        if storage.exists(self._base + ".done"):
            return True
        owner = describe(self._base + ".json")
        # A torn or foreign record has no owner to ask and goes by silence alone.
        if owner.get("host") == _this_host() and isinstance(owner.get("pid"), int):
            start = _process_start(owner["pid"])
            if not start or start != owner.get("process_start"):
                return True
        try:
            beat = storage.read_bytes(self._base + ".beat")
        except FileNotFoundError:
            beat = b""
        if beat != self._seen:
            self._seen, self._since = beat, time.monotonic()
        return time.monotonic() - self._since > STALE_SECONDS


def describe(url: str) -> dict[str, Any]:
    """The owner recorded in a lease object; empty when it cannot be read."""
    try:
        owner = storage.read_json(url)
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _latest(root: str) -> int:
    names = storage.list_names(storage.join(root, _DIRECTORY))
    numbers = [int(name[:6]) for name in names if name[:6].isdigit() and name.endswith(".json")]
    return max(numbers, default=0)


def holder(root: str) -> dict[str, Any] | None:
    """Who holds the step's lease as far as one look can tell; None when nobody does."""
    number = _latest(root)
    base = storage.join(root, _DIRECTORY, f"{number:06d}")
    if number == 0 or _Observer(base).free():
        return None
    return {"number": number, **describe(base + ".json")}


def acquire(
    root: str, *, published: Callable[[], bool], waiting: Callable[[dict[str, Any]], None]
) -> Lease | None:
    """Take the lease on the step in directory `root`, waiting for a live holder.

    Args:
        root: the step's directory.
        published: asked on every look; the wait ends with None once it is true.
        waiting: told the holder once, when there is one to wait for.
    """
    observer: _Observer | None = None
    observed = -1
    while not published():
        number = _latest(root)
        base = storage.join(root, _DIRECTORY, f"{number:06d}")
        if number != observed:
            observer, observed = _Observer(base), number
        if number == 0 or (observer is not None and observer.free()):
            mine = storage.join(root, _DIRECTORY, f"{number + 1:06d}.json")
            if storage.create(mine, json.dumps(_this_owner()).encode()):
                return Lease(root, number + 1)
            continue
        waiting(describe(base + ".json"))
        time.sleep(0.5)
    return None
