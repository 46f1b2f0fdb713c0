"""The driver's operations on its store: an error of one never ends the steps that run.

One whose error may pass is tried again with back-off for minutes; the driver does not wait for it.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pipeline import events
from pipeline.errors import PonenteError
from pipeline.events import Emit
from pipeline.store import retry

PATIENCE_SECONDS = 600.0
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0
_THREADS = 16

T = TypeVar("T")

logger = logging.getLogger("ponente")


@dataclass(eq=False)
class _Errand:
    """An operation, and how long it has been tried."""

    what: str
    action: Callable[[], Any]
    begun: float
    done: Callable[[Any], None] = lambda _: None
    failed: Callable[[Exception], None] = lambda _: None
    tries: int = 0
    due: float = 0.0
    future: concurrent.futures.Future[Any] | None = None
    pauses: Iterator[float] = field(
        default_factory=lambda: retry.pauses(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
    )


class Errands:
    """Operations in progress."""

    def __init__(
        self, local: bool, stopping: Callable[[], bool], report: Emit, clock: Callable[[], float]
    ) -> None:
        self._local, self._stopping, self._report, self._clock = local, stopping, report, clock
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: dict[_Errand, None] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def begin(
        self,
        what: str,
        action: Callable[[], T],
        done: Callable[[T], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._try(_Errand(what, action, self._clock(), done, failed))

    def insist(self, what: str, action: Callable[[], T], sleep: Callable[[float], None]) -> T:
        """The result of `action`; an `OSError` is raised only when it lasts `PATIENCE_SECONDS`."""
        errand, begun = None, self._clock()
        while True:
            try:
                return action()
            except OSError as error:
                errand = errand or _Errand(what, action, begun)
                if (pause := self._pause(errand, error)) is None:
                    raise
            sleep(pause)

    def _pause(self, errand: _Errand, error: Exception) -> float | None:
        """Seconds until the next try; None when the error is final."""
        spent = self._clock() - errand.begun
        errand.tries += 1
        refused = isinstance(error.__context__, PermissionError)
        if refused or not isinstance(error, OSError) or spent >= PATIENCE_SECONDS:
            return None
        self._report(events.Retrying(errand.what, str(error), errand.tries, spent))
        return min(next(errand.pauses), PATIENCE_SECONDS - spent)

    def poll(self) -> None:
        """End the operations that have a result, in the order they began, and retry others."""
        now = self._clock()
        for errand in list(self._pending):
            if errand.future is not None and errand.future.done():
                self._end(errand, errand.future.result)
            elif errand.future is None and (errand.due <= now or self._stopping()):
                self._try(errand)

    def pause(self, sleep: Callable[[float], None], seconds: float) -> None:
        """Wait for at most `seconds` until `poll` may have something to do."""
        futures = [e.future for e in self._pending if e.future is not None]
        if futures:
            concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_COMPLETED)
            return
        left = min((e.due for e in self._pending), default=0.0) - self._clock()
        if left > 0:
            sleep(min(left, seconds))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _try(self, errand: _Errand) -> None:
        if self._local:
            self._end(errand, errand.action)
            return
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "driver-store")
        errand.future = self._pool.submit(errand.action)
        self._pending[errand] = None

    def _end(self, errand: _Errand, result: Callable[[], Any]) -> None:
        errand.future = None
        try:
            value = result()
        except Exception as error:
            pause = None if self._stopping() else self._pause(errand, error)
            if pause is not None:
                errand.due = self._clock() + pause
                self._pending[errand] = None
                return
            if not isinstance(error, PonenteError | OSError):
                logger.error("%s: unexpected error", errand.what, exc_info=error)
            self._pending.pop(errand, None)
            errand.failed(error)
        else:
            self._pending.pop(errand, None)
            errand.done(value)
