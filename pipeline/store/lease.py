"""A lease on a step: so that two executors do not do the same work twice.

Correctness does not rest on it: publishing is a conditional create (see `manifest.py`). A lease is
a numbered object, `leases/000007.json`, created if absent, so of two takers one wins and the number
fences the loser. The holder counts heartbeats in `000007.beat`; `000007.done` releases it.

No wall clock is compared. A holder is dead when it lived on this host and its process is gone
(noticed at once), or when its heartbeat count did not change for `STALE_SECONDS` of the observer's
own monotonic clock. Whatever lies in `leases/`, one of these comes true: nothing has to be unlocked
by hand.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from pipeline.store import storage

BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
LOOK_SECONDS = 0.5
_DIRECTORY = "leases"
# A release or a heartbeat without its record counts too: its number is used up.
_NAME = re.compile(r"([0-9]{6,18})\.(?:json|beat|done)")

logger = logging.getLogger("ponente")


def _read_text(path: str) -> str:
    try:
        # A process may call itself anything, also what is not UTF-8.
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _process_start(pid: int) -> str:
    """When a process of this host started, in clock ticks since boot; empty when it is gone."""
    stat = _read_text(f"/proc/{pid}/stat")
    # The command name is in parentheses and may hold spaces; state and times follow it.
    fields = stat.rpartition(")")[2].split()
    return "" if not fields or fields[0] in "ZX" else fields[19]


def _is_gone(pid: Any, start: Any) -> bool:
    """Whether the process of this host that a record names has certainly ended."""
    if type(pid) is not int or not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # Not ours to signal, so it is there.
    # Another user's process can be hidden and some systems have no /proc: that says nothing.
    known = isinstance(start, str) and start and os.path.exists(f"/proc/{pid}")
    return bool(known) and _process_start(pid) != start


def _this_host() -> str:
    """Name, boot and process-id namespace: equal only where a pid means the same process."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {_read_text('/proc/sys/kernel/random/boot_id')} {namespace}"


def _this_owner() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "host": _this_host(),
        "pid": pid,
        "process_start": _process_start(pid),
        "nonce": uuid.uuid4().hex,
        "since": time.time(),  # For people; nothing is decided by it.
    }


class Lease:
    """A held lease; beats in a thread until `release`."""

    def __init__(self, root: str, number: int) -> None:
        self.number = number
        self._root = root
        self._base = storage.join(root, _DIRECTORY, f"{number:06d}")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"lease-{number}", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        count, missed = 0, False
        while not self._stop.wait(BEAT_SECONDS):
            count += 1
            try:
                storage.write_atomic(self._base + ".beat", str(count).encode(), durable=False)
                missed = False
            except Exception as error:  # noqa: BLE001 - a store's client may raise anything
                # A missed beat only brings a takeover nearer, which publishing survives; a thread
                # that ended with it would never beat again.
                if not missed:
                    logger.warning("%s.beat: cannot be written: %r", self._base, error)
                missed = True

    def newest(self) -> bool:
        """Whether nobody took the lease over since."""
        return _latest(self._root) == self.number

    def release(self) -> None:
        """Stop beating and let the next taker in at once.

        Never raises: the step has ended by now, and a lease that cannot be released goes by its
        owner's end or silence.
        """
        self._stop.set()
        # A beat that hangs in the store must not hold up the step; a late one does no harm.
        self._thread.join(BEAT_SECONDS)
        try:
            storage.create(self._base + ".done", b"", durable=False)
        except Exception as error:  # noqa: BLE001 - a store's client may raise anything
            logger.warning("%s.done: cannot be written: %r", self._base, error)


class _Observer:
    """Watches one foreign lease by this process's monotonic clock."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._seen: bytes | None = None
        self._silent = 0.0
        self._looked = time.monotonic()

    def free(self) -> str:
        """Why the lease can be taken: released, owner dead or silent for too long; else empty."""
        if _is_there(self._base + ".done"):
            return "released"
        owner = describe(self._base + ".json")
        # A torn or foreign record has no owner to ask and goes by silence alone.
        if owner.get("host") == _this_host() and _is_gone(
            owner.get("pid"), owner.get("process_start")
        ):
            return "its process is gone"
        # Only silence that was watched counts: the time this process itself was stopped, or its
        # machine was, says nothing about the holder. So the clock is read before the heartbeat.
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, BEAT_SECONDS), now
        beat = _beat(self._base)
        self._silent = self._silent + passed if beat == self._seen else 0.0
        self._seen = beat
        return f"silent for {self._silent:.1f} s" if self._silent > STALE_SECONDS else ""


def _is_there(url: str) -> bool:
    """Whether a small object is there, by reading it: one request, and never a listing."""
    try:
        storage.read_bytes(url)
    except FileNotFoundError:
        return False
    except IsADirectoryError:
        return True
    return True


def _beat(base: str) -> bytes:
    try:
        return storage.read_bytes(base + ".beat")
    except FileNotFoundError:
        return b""
    except OSError:
        # One failed read is a change and begins the silence anew; a lasting failure is silence.
        return b"unreadable"


def describe(url: str) -> dict[str, Any]:
    """The owner recorded in a lease object; empty when it cannot be read."""
    try:
        owner = storage.read_json(url)
    except (OSError, ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _base_url(root: str, number: int) -> str:
    return storage.join(root, _DIRECTORY, f"{number:06d}")


def _latest(root: str) -> int:
    """The highest number in use, 0 if none; a listing that lags behind only costs requests."""
    names = storage.list_names(storage.join(root, _DIRECTORY))
    numbers = [(int(found[1]), found[1]) for name in names if (found := _NAME.fullmatch(name))]
    # Of seven digits and more, only those without leading zeros are names of ours.
    number = max((number for number, text in numbers if text == f"{number:06d}"), default=0)
    while _is_there(_base_url(root, number + 1) + ".json"):
        number += 1
    return number


def holder(root: str) -> dict[str, Any] | None:
    """Who holds the step's lease as far as one look can tell; None when nobody does."""
    number = _latest(root)
    base = _base_url(root, number)
    if number == 0 or _Observer(base).free():
        return None
    return {"number": number, **describe(base + ".json")}


def end(root: str) -> dict[str, Any] | None:
    """Declare the newest lease released, whoever holds it; returns its owner, None if none held.

    For a person who knows better; publishing stays safe even if the owner turns out to live.
    """
    owner = holder(root)
    if owner is not None:
        storage.create(_base_url(root, owner["number"]) + ".done", b"")
    return owner


def words(owner: dict[str, Any]) -> str:
    """A lease's owner in words: process, host, and since when by its own clock."""
    text = f"process {owner.get('pid')} on {str(owner.get('host', '?')).split(' ')[0]}"
    since = owner.get("since")
    if isinstance(since, int | float):
        text += time.strftime(", since %Y-%m-%d %H:%M:%S", time.localtime(since))
    return text


def acquire(
    root: str, *, published: Callable[[], bool], waiting: Callable[[dict[str, Any]], None]
) -> Lease | None:
    """Take the lease on the step in directory `root`, waiting for a live holder.

    Args:
        root: the step's directory.
        published: asked on every look; the wait ends with None once it is true.
        waiting: told the holder once a look, while there is one to wait for.
    """
    observer, observed = _Observer(""), 0
    while True:
        number = _latest(root)
        if number != observed:
            observer, observed = _Observer(_base_url(root, number)), number
        free = observer.free() if number else "never taken"
        # Asked after the look: a holder publishes before it releases, so whoever finds a released
        # lease and then no output does not repeat finished work.
        if published():
            return None
        if not free:
            waiting(describe(_base_url(root, number) + ".json"))
        elif _take(root, number + 1, free):
            return Lease(root, number + 1)
        time.sleep(LOOK_SECONDS)


def _take(root: str, number: int, why: str) -> bool:
    """Create the record of lease `number`; False when somebody was faster."""
    owner = {**_this_owner(), "previous": why}
    url = _base_url(root, number) + ".json"
    if storage.create(url, json.dumps(owner).encode(), durable=False):
        return True
    # A store whose answer was lost and which was asked again says no to the winner as well.
    return describe(url).get("nonce") == owner["nonce"]
