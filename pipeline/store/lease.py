"""A lease on a step, which prevents two executors from doing the same work.

Correctness does not depend on it: publishing is a conditional write (see `execute/attempt.py`). A
lease is a numbered object, `leases/000007.json`, created if absent; so of two takers one wins, and
the number is a fencing token against the older owner. The owner counts heartbeats in `000007.beat`;
`000007.done` releases the lease.

The record has what its owner reads, which garbage collection leaves alone. The collector decides
about outputs while it holds the lease of the store's `collecting`; a reader waits for that one
after its own lease was created, and a run after its summary was. So one always sees the other.

No wall clocks are compared. An owner is dead when it ran on this host and its process is gone
(detected at once), or when its heartbeat count did not change for `STALE_SECONDS` of the observer's
own monotonic clock. So no manual cleanup is needed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import PonenteError
from pipeline.store import process, storage
from pipeline.store.parallel import by_item

BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
LOOK_SECONDS = 0.5
DIRECTORY = "leases"
_COLLECTOR = "collector"  # in a store: the lease of the process that decides what to delete
# A number is in use even where only its heartbeat or its release is left.
_NAME = re.compile(r"([0-9]{6,18})\.(?:json|beat|done)")

logger = logging.getLogger("ponente")


class Lease:
    """A held lease; a thread writes heartbeats until `release`."""

    def __init__(self, root: str, number: int) -> None:
        self.number = number
        self._root = root
        self._base = _base_url(root, number)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"lease-{number}", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        count, missed = 0, False
        while not self._stop.wait(BEAT_SECONDS):
            count += 1
            try:
                # Bounded: a connection that hangs for a minute would cost the lease.
                with storage.giving_up_after(BEAT_SECONDS):
                    storage.write_atomic(self._base + ".beat", str(count).encode(), durable=False)
                missed = False
            except Exception as error:  # noqa: BLE001 - a store's client may raise anything
                # The thread must continue: one missed heartbeat does no harm, a dead thread means a
                # takeover, though publishing stays safe even then.
                if not missed:
                    logger.warning("%s.beat: cannot be written: %r", self._base, error)
                missed = True

    def newest(self) -> bool:
        """Whether no other process has taken over the lease."""
        return _latest(self._root) == self.number

    def stop(self) -> None:
        """Stop the heartbeats without a release: the lease expires, or its owner deletes it."""
        self._stop.set()
        self._thread.join(BEAT_SECONDS)  # bounded, as a heartbeat may hang; a late one does no harm

    def release(self) -> None:
        """Stop the heartbeats and free the lease at once; one that cannot be released expires."""
        self.stop()
        try:
            storage.create(self._base + ".done", b"", durable=False)
        except Exception as error:  # noqa: BLE001 - a store's client may raise anything
            logger.warning("%s.done: cannot be written: %r", self._base, error)


class _Observer:
    """Watches one lease of another process, by this process's monotonic clock."""

    def __init__(self, base: str) -> None:
        self._base = base
        self.responded = False  # whether a heartbeat was seen to change
        self._seen: bytes | None = None
        self._silent = 0.0
        self._looked = time.monotonic()

    def free(self) -> str:
        """Why the lease can be taken: released, owner dead or unresponsive; else empty."""
        if _is_there(self._base + ".done"):
            return "released"
        owner = read_owner(self._base + ".json")
        # A record that cannot be read has no pid to check; it expires by its heartbeats alone.
        if process.is_gone(owner):
            return "its process is gone"
        # Time for which this process or its machine was suspended does not count against the owner:
        # hence the cap at `BEAT_SECONDS`, and the clock is read before the heartbeat.
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, BEAT_SECONDS), now
        try:
            beat = storage.read_bytes(self._base + ".beat")
        except FileNotFoundError:
            beat = b""
        except OSError:  # the first looks like a heartbeat and restarts the timeout, more like none
            beat = b"unreadable"
        self.responded = self.responded or self._seen not in (None, beat)
        self._silent = self._silent + passed if beat == self._seen else 0.0
        self._seen = beat
        return f"unresponsive for {self._silent:.1f} s" if self._silent > STALE_SECONDS else ""


def _is_there(url: str) -> bool:
    """Whether a small object exists, by reading it: one request, and never a listing."""
    try:
        storage.read_bytes(url)
    except FileNotFoundError:
        return False
    except IsADirectoryError:
        pass
    return True


def read_owner(url: str) -> dict[str, Any]:
    try:
        owner = storage.read_json(url)
    except (OSError, ValueError, PonenteError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _base_url(root: str, number: int) -> str:
    return storage.join(root, DIRECTORY, f"{number:06d}")


def _latest(root: str) -> int:
    """The highest number in use, 0 if none; a listing that lags behind only costs requests."""
    return _after(root, _newest(storage.list_names(storage.join(root, DIRECTORY))))


def _after(root: str, number: int) -> int:
    while _is_there(_base_url(root, number + 1) + ".json"):
        number += 1
    return number


def _newest(names: Iterable[str]) -> int:
    texts = [found[1] for name in names if (found := _NAME.fullmatch(name))]
    # `_base_url` pads to six digits, so a longer number has no leading zero.
    return max((int(text) for text in texts if text == f"{int(text):06d}"), default=0)


@dataclass(frozen=True)
class Holder:
    """The owner of lease `number` by one look; `age` is that of its last heartbeat in seconds."""

    number: int
    owner: dict[str, Any]
    age: float | None

    @property
    def responsive(self) -> bool:
        return self.age is None or self.age <= STALE_SECONDS

    def __str__(self) -> str:
        text = owner_text(self.owner)
        return text if self.age is None else f"{text}, last heartbeat {self.age:,.0f} s ago"


def holder(root: str, names: Collection[str] | None = None) -> Holder | None:
    """The owner of the step's lease, as far as one look can tell; None when the lease is free.

    `names`, from a recent listing of the lease directory, save the requests for a released lease.
    """
    if names is not None and (not names or f"{_newest(names):06d}.done" in names):
        return None
    number = _latest(root)
    base = _base_url(root, number)
    if number == 0 or _Observer(base).free():
        return None
    age = process.age(base + ".beat", base + ".json")
    return Holder(number, read_owner(base + ".json"), age)


def end(root: str) -> Holder | None:
    """Release the newest lease, of any holder, for an operator; returns the owner."""
    found = holder(root)
    if found is not None:
        storage.create(_base_url(root, found.number) + ".done", b"")
    return found


def owner_text(owner: dict[str, Any]) -> str:
    text = f"process {owner.get('pid')} on {process.host_name(owner)}"
    try:
        since = time.localtime(owner["since"])
    except (KeyError, TypeError, OverflowError, ValueError, OSError):
        return text  # a record that was damaged
    return f"{text}, since {time.strftime('%Y-%m-%d %H:%M:%S', since)}"


def acquire(
    root: str,
    *,
    published: Callable[[], bool],
    waiting: Callable[[dict[str, Any]], None],
    reads: Mapping[str, str | None] = {},
) -> Lease | None:
    """Take the lease on the step in directory `root`, waiting while a live owner holds it.

    Args:
        published: called at every poll; once it returns True, the result is None.
        waiting: called with the owner's record at every poll while it holds the lease.
        reads: directories of the outputs that the owner reads, as names in the same store or URLs,
            and the oldest attempt of each that it may have open: empty for any, None for what is
            published only.
    """
    watch = Watch()
    while True:
        free = watch.look(root)
        # Called after `look`: an owner publishes before it releases, so a released lease and then
        # no output means that there is no finished work to repeat.
        if published():
            return None
        if not free:
            waiting(watch.owner(root))
        elif (held := watch.take(root, reads)) is not None:
            return held
        time.sleep(LOOK_SECONDS)


@contextlib.contextmanager
def collecting(prefix: str) -> Iterator[Lease]:
    """Hold the lease without which no outputs of a store are chosen for deletion."""
    held = acquire(
        storage.join(prefix, _COLLECTOR), published=lambda: False, waiting=lambda _: None
    )
    assert held is not None
    try:
        yield held
    finally:
        held.release()


def wait_for_collector(
    prefix: str, waiting: Callable[[dict[str, Any]], None] = lambda _: None
) -> None:
    """Return once no process decides which outputs of the store to delete."""
    watch, root = Watch(), storage.join(prefix, _COLLECTOR)
    if not _is_there(_base_url(root, 1) + ".json"):  # no process ever did, so there are none later
        return
    while not watch.look(root):
        waiting(watch.owner(root))
        time.sleep(LOOK_SECONDS)


class Watch:
    """Looks at the leases of many steps, repeatedly, and takes those that are free."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, _Observer]] = {}
        self._free: dict[str, str] = {}

    def look(self, root: str) -> str:
        """Why the step's lease is free; empty while it is held."""
        names = storage.list_names(storage.join(root, DIRECTORY))
        number = _after(root, _newest(names))
        if root not in self._seen or self._seen[root][0] != number:
            self._seen[root] = (number, _Observer(_base_url(root, number)))
        if number == 0:
            free = "never taken"
        else:
            free = "released" if f"{number:06d}.done" in names else self._seen[root][1].free()
        self._free[root] = free
        return free

    def owner(self, root: str) -> dict[str, Any]:
        return read_owner(_base_url(root, self._seen[root][0]) + ".json")

    def take(self, root: str, reads: Mapping[str, str | None] = {}) -> Lease | None:
        """Take the lease that was free at the last look; None when another process was faster."""
        number, nonce = self._seen[root][0] + 1, uuid.uuid4().hex
        owner = {**process.this(), "nonce": nonce, "previous": self._free[root]}
        owner["since"] = time.time()  # displayed only
        owner |= {"reads": dict(reads)} if reads else {}
        url = _base_url(root, number) + ".json"
        # A retried write whose first answer was lost is refused for the winner too: the nonce.
        won = storage.create(url, json.dumps(owner).encode(), durable=False)
        return Lease(root, number) if won or read_owner(url).get("nonce") == nonce else None

    def held(self, roots: Iterable[str], *, wait: float = 0.0) -> list[str]:
        """The steps whose leases are held; watches them together for `wait` seconds at most."""
        deadline = time.monotonic() + wait
        left = list(roots)
        while True:
            found = by_item(self.look, left, left[0] if left else "")
            left = [root for root, free in found.items() if not free]
            responded = all(self._seen[root][1].responded for root in left)
            if responded or time.monotonic() >= deadline:
                return left
            time.sleep(LOOK_SECONDS)
