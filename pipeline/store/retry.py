"""Retrying after transient errors: one policy for disks, object stores and sources.

An operation is retried with exponential back-off and jitter until its deadline. A host that never
answered this process has the short deadline `UNREACHABLE_SECONDS`, since the address is most likely
wrong. A cancellation ends a wait for a source within `CANCEL_SECONDS`, and none for a store, which
a stop waits for. Long waits are reported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline import events
from pipeline.errors import Cancelled, InputError, StoreUnavailable
from pipeline.events import Emit

UNREACHABLE_SECONDS = 3.0
CANCEL_SECONDS = 1.0  # deadline of a failing operation after a cancellation
REPORT_SECONDS = 2.0
_SLICE_SECONDS = 0.2
_UNREACHABLE = re.compile(
    r"name or service not known|name resolution|nodename nor servname|no address associated"
    r"|name does not resolve|connection refused|cannot connect to host|network is unreachable",
    re.IGNORECASE,
)

logger = logging.getLogger("ponente")


@dataclass(frozen=True)
class Policy:
    """How long an operation is retried: seconds from the first attempt, and between two attempts.

    `cancellable` is not for a store: a stop waits for what is being saved there, however slowly.
    """

    seconds: float
    first: float = 0.25
    longest: float = 16.0
    attempts: int = 10_000
    cancellable: bool = False


def pauses(first: float, longest: float) -> Iterator[float]:
    """Pauses that double from `first` to `longest`, each times a random factor of 0.5 to 1.5."""
    while True:
        yield first * random.uniform(0.5, 1.5)
        first = min(2 * first, longest)


def seconds_of(variable: str, default: float, least: float = 0.0) -> float:
    """Seconds from an environment variable. Raises `InputError` for less than `least`, or none."""
    text = os.environ.get(variable) or str(default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not least <= seconds < float("inf"):
        raise InputError(
            f"{variable}={text!r}: expected seconds, at least {least:g}; correct it or unset it"
        )
    return seconds


_Scope = tuple[Callable[[], bool], Emit | None]  # whether it is cancelled, reports of long waits
# Global and not per thread: requests to object stores run in another thread, that of fsspec.
_scopes: list[_Scope] = []
_reached: set[str] = set()
_lock = threading.Lock()


@contextlib.contextmanager
def scope(cancelled: Callable[[], bool], report: Emit | None = None) -> Iterator[None]:
    """While the block runs, retries in this process check `cancelled` and report long waits."""
    mine = (cancelled, report)
    with _lock:
        _scopes.append(mine)
    try:
        yield
    finally:
        with _lock:
            _scopes.remove(mine)


def _current() -> _Scope:
    with _lock:
        return _scopes[-1] if _scopes else (lambda: False, None)


def unreachable(error: BaseException | None) -> bool:
    """Whether an error means that no connection was made: no such host, or it refuses them."""
    for _ in range(8):
        if error is None:
            return False
        if isinstance(error, socket.gaierror | ConnectionRefusedError):
            return True
        if _UNREACHABLE.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class Retry:
    """The attempts at an operation on `what`; once `place` has answered, it is reachable."""

    def __init__(self, what: str, policy: Policy, place: str = "", remedy: str = "") -> None:
        self.what = what
        self._policy, self._place, self._remedy = policy, place, remedy
        self._begun = self._reported = time.monotonic()
        self._pauses = pauses(policy.first, policy.longest)
        self._attempts = 1
        self._cancelled: float | None = None

    @property
    def left(self) -> float:
        return max(self._policy.seconds - (time.monotonic() - self._begun), 0.0)

    def succeeded(self) -> None:
        _reached.add(self._place)

    def check(self) -> None:
        """Raise `Cancelled` once the cancellation is older than `CANCEL_SECONDS`."""
        if not self._policy.cancellable:
            return
        now = time.monotonic()
        if self._cancelled is None and _current()[0]():
            self._cancelled = now
        if self._cancelled is not None and now - self._cancelled >= CANCEL_SECONDS:
            raise Cancelled(f"{self.what}: cancelled after {self._attempts} attempts")

    def pause(self, error: Exception, cause: str, at_least: float = 0.0) -> float:
        """Seconds to wait before the next attempt, after a transient `error`.

        `at_least` is what the server requested. Raises `InputError` when the place is unreachable
        and never answered, `StoreUnavailable` when the deadline or the attempts are used up,
        `Cancelled`.
        """
        self.check()
        spent = time.monotonic() - self._begun
        seconds = max(next(self._pauses), at_least)
        if unreachable(error):
            if self._place not in _reached and spent + seconds > UNREACHABLE_SECONDS:
                raise InputError(
                    f"{self.what}: cannot be reached ({cause}); check the address and the network"
                )
        else:
            self.succeeded()
        if self._attempts >= self._policy.attempts or spent + at_least >= self._policy.seconds:
            times = f"failed {self._attempts} times in {spent:.1f} s, the last time with {cause}"
            raise StoreUnavailable(f"{self.what}: {times}{self._remedy}")
        self._attempts += 1
        self._report(cause, spent)
        return max(min(seconds, self._policy.seconds - spent), at_least)

    def _report(self, cause: str, spent: float) -> None:
        now = time.monotonic()
        if now - self._reported < REPORT_SECONDS:
            return
        self._reported = now
        if (report := _current()[1]) is not None:
            report(events.Retrying(self.what, cause, self._attempts, spent))
        line = "retrying: %s, %s, attempt %d, %.0f s"
        logger.warning(line, self.what, cause, self._attempts, spent)

    def sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, _SLICE_SECONDS))
