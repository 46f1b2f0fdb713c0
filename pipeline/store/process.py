"""Which process a record in a store names, and whether it has ended: certain on one host only.

Elsewhere a process is known by its heartbeats, and their age is a difference of times of the store.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any

import psutil

from pipeline.errors import PonenteError
from pipeline.store import storage

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this() -> dict[str, Any]:
    pid = os.getpid()
    return {"host": this_host(), "pid": pid, "process_start": start_of(pid)}


def this_host() -> str:
    """Host name, boot id and pid namespace: equal only where a pid means the same process."""
    try:
        boot, namespace = _BOOT_ID.read_text().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = namespace = ""
    return f"{socket.gethostname()} {boot} {namespace}"


def host_name(record: dict[str, Any]) -> str:
    return str(record.get("host", "?")).split(" ")[0]


def is_here(record: dict[str, Any]) -> bool:
    return record.get("host") == this_host()


def is_gone(record: dict[str, Any]) -> bool:
    """Whether the record names a process of this host that has certainly ended."""
    pid, start = record.get("pid"), record.get("process_start")
    if not is_here(record) or type(pid) is not int or not 0 < pid < 1 << 31:
        return False
    try:
        found = start_of(pid)
    except psutil.NoSuchProcess:
        return True
    # With another start time, the pid was reused. An unknown start time proves nothing.
    return isinstance(start, float) and found is not None and abs(found - start) > 1.0


def start_of(pid: int) -> float | None:
    """When a process of this host started, in seconds since boot; None when that is not known."""
    try:
        # In this order both times are of one reading of the wall clock, whenever that is set.
        boot = psutil.boot_time()
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            raise psutil.NoSuchProcess(pid)
        return round(process.create_time() - boot, 2)
    except psutil.NoSuchProcess:
        raise
    except (psutil.Error, OSError):
        return None


def age(*urls: str) -> float | None:
    times = [moment for url in urls if (moment := storage.modified(url)) is not None]
    return max(0.0, now(urls[0].rpartition("/")[0]) - max(times)) if times else None


def now(directory: str) -> float:
    """The time by the clock of the store, of an object written for it; else this machine's."""
    url = f"{directory}/clock.{uuid.uuid4().hex}.tmp"  # a name that listings leave out
    try:
        storage.write_atomic(url, b"", durable=False)
        moment = storage.modified(url)
        storage.delete_tree(url)
    except (OSError, PonenteError):
        moment = None
    return time.time() if moment is None else moment
