"""Checks of the store at a prefix: does it keep what the commit protocol needs it to keep?

Everything happens under a folder of its own in the prefix, which is deleted again.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import socket
import statistics
import threading
import time
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

from pipeline.doctor.finding import Finding, describe
from pipeline.store import storage

T = TypeVar("T")
_RACERS = 4
_SKEW_SECONDS, _CONNECT_SECONDS = 5.0, 5.0
_LITTLE, _TOO_LITTLE = 20 * 10**9, 10**9

# Prefix -> (folders that were not there, checks at work in it). Checks run at the same time, and
# the last one out takes the folders away.
_made: dict[str, tuple[list[str], list[str]]] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def _folder(prefix: str) -> Iterator[str]:
    """A folder of our own in the store; nothing of it is left, nor a prefix that was not there."""
    prefix = storage.normalise(prefix)
    url = storage.join(prefix, f".doctor-{uuid.uuid4().hex}")
    with _lock:
        if prefix not in _made:
            _made[prefix] = (_missing_folders(prefix) if storage.is_local(prefix) else [], [])
        missing, users = _made[prefix]
        users.append(url)
    try:
        yield url
    finally:
        with contextlib.suppress(Exception):
            storage.delete_tree(url)
        with _lock:
            users.remove(url)
            if not users:
                del _made[prefix]
                for folder in missing:
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)


def _missing_folders(path: str) -> list[str]:
    """The folders that have to be made for `path` to be one, innermost first."""
    missing = []
    while path != os.path.dirname(path) and not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def store(prefix: str) -> Finding:
    """Create, read, refuse a second create, overwrite, list, delete: each as the engine does it."""
    times: list[float] = []
    step = "create an object"

    def timed(name: str, action: Callable[[], T]) -> T:
        nonlocal step
        step, start = name, time.perf_counter()
        result = action()
        times.append(time.perf_counter() - start)
        return result

    try:
        with _folder(prefix) as folder:
            problem = _exercise(folder, timed)
    except Exception as error:  # noqa: BLE001 - any library may be behind a URL
        return Finding(
            "store",
            "fail",
            f"cannot {step}: {describe(error)}",
            f"give a --prefix that this user may write to, not {prefix}",
        )
    if problem:
        return Finding(
            "store",
            "fail",
            problem,
            f"do not run on {prefix}: outputs could be lost or published twice; use a local disk "
            "or gs://",
        )
    return Finding(
        "store",
        "ok",
        f"{prefix}: conditional create, overwrite, listing and delete work; "
        f"{statistics.median(times) * 1e3:.1f} ms an operation",
    )


def _exercise(folder: str, timed: Callable[[str, Callable[[], object]], object]) -> str:
    """What the store did wrong, or nothing. `timed` runs one named operation."""
    url = storage.join(folder, "record")
    if not timed("create an object", lambda: storage.create(url, b"first")):
        return "create says an object exists where none was written"
    if timed("read an object", lambda: storage.read_bytes(url)) != b"first":
        return "a created object reads back as something else"
    if timed("create an object twice", lambda: storage.create(url, b"second")):
        return "a second create of one object succeeded: create is not conditional here"
    if timed("read an object", lambda: storage.read_bytes(url)) != b"first":
        return "a refused create changed the object all the same"
    winners = _race(storage.join(folder, "raced"))
    if winners != 1:
        return f"of {_RACERS} racing creates {winners} succeeded, not one"
    timed("overwrite an object", lambda: storage.write_atomic(url, b"third"))
    if timed("read an object", lambda: storage.read_bytes(url)) != b"third":
        return "an overwritten object still reads as before"
    if timed("list a folder", lambda: storage.list_names(folder)) != ["raced", "record"]:
        return "a listing does not show the objects just written"
    timed("delete a folder", lambda: storage.delete_tree(folder))
    if timed("list a folder", lambda: storage.list_names(folder)):
        return "a listing still shows deleted objects"
    return ""


def _race(url: str) -> int:
    """How many of some simultaneous creates of one object say they won."""
    wins: list[bool] = []
    barrier = threading.Barrier(_RACERS)
    errors: list[Exception] = []

    def create(number: int) -> None:
        barrier.wait()
        try:
            wins.append(storage.create(url, str(number).encode()))
        except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)

    threads = [
        threading.Thread(target=create, args=(number,), daemon=True) for number in range(_RACERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(wins)


def clock(prefix: str) -> Finding:
    """How far the store's clock is from this machine's."""
    with _folder(prefix) as folder:
        url = storage.join(folder, "clock")
        before = time.time()
        storage.create(url, b"now")
        after = time.time()
        fs, path = storage.filesystem(url)
        try:
            modified = fs.modified(path)
        except (NotImplementedError, KeyError, RuntimeError):
            return Finding("clock", "ok", "the store does not tell the time of an object")
    if isinstance(modified, datetime.datetime):
        zone = modified.tzinfo or datetime.UTC
        modified = modified.replace(tzinfo=zone).timestamp()
    skew = min(modified - before, 0.0) + max(modified - after, 0.0)
    if abs(skew) <= _SKEW_SECONDS:
        return Finding("clock", "ok", f"within {_SKEW_SECONDS:g} s of the store's")
    direction = "behind" if skew > 0 else "ahead of"
    return Finding(
        "clock",
        "warn",
        f"{abs(skew):,.0f} s {direction} the store's",
        "no decision depends on it, but times in logs will not line up: run an NTP client",
    )


def disk(prefix: str) -> Finding:
    """Free space under a local prefix."""
    if not storage.is_local(prefix):
        return Finding("disk", "ok", "the store is not on this machine's disks")
    path = storage.local_path(prefix)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    free = shutil.disk_usage(path).free
    found = f"{free / 1e9:,.1f} GB free under {path}"
    if free >= _LITTLE:
        return Finding("disk", "ok", found)
    advice = "a 200M run writes some 10 GB of tokens, and 2.4 GB a checkpoint"
    return Finding("disk", "fail" if free < _TOO_LITTLE else "warn", found, advice)


def _unreachable(prefix: str) -> str:
    """Why the servers of a gs:// prefix cannot be connected to; empty when they can.

    Asked first, because gcsfs looks for credentials and tries again for a minute before it says.
    """
    if not prefix.startswith(("gs://", "gcs://")) or urllib.request.getproxies().get("https"):
        return ""
    named = (os.environ.get(n) for n in ("FSSPEC_GCS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"))
    url = next((value for value in named if value), "https://storage.googleapis.com")
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    host, port = parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return f"{host}:{port}: {describe(error)}"
    return ""


def bucket(prefix: str) -> Finding:
    """Whether the bucket of a remote prefix is there and answers."""
    if storage.is_local(prefix):
        return Finding("bucket", "ok", "not asked: the store is on this machine's disks")
    start = time.perf_counter()
    if problem := _unreachable(prefix):
        return Finding("bucket", "fail", problem, "check the network, and what a firewall lets out")
    try:
        fs, path = storage.filesystem(prefix)
        name = path.partition("/")[0]
        fs.invalidate_cache()
        try:
            found = f"{len(fs.ls(path, detail=False))} entries at {prefix}"
        except FileNotFoundError:
            # An object store has no empty folders: a new prefix looks like this, and so does a
            # bucket that is not there. Paths that start with a slash have no bucket.
            if not path.startswith("/") and not fs.exists(name):
                return Finding("bucket", "fail", f"there is no bucket {name!r}", "create it")
            found = f"nothing at {prefix} yet"
    except Exception as error:  # noqa: BLE001 - any library may be behind a URL
        return Finding(
            "bucket",
            "fail",
            f"{prefix}: {describe(error)}",
            "check the network, log in (gcloud auth application-default login), or ask for access",
        )
    return Finding("bucket", "ok", f"{found}; {(time.perf_counter() - start) * 1e3:.0f} ms")
