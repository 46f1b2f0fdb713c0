"""Ends a run that makes no progress, with the stacks of every process, instead of idling.

JAX notices a process that died (`training.sharding.distributed`), but not one that lives and never
enters a collective: the others wait for it for ever (https://github.com/jax-ml/jax/issues/38503).
So a thread in every process watches the time since the loop's last sign of life. After too long it

1. says so in the coordination service, so that the other processes end within seconds too,
2. logs where each process was, which of them are behind, and the stack of every thread,
3. ends the process with `EXIT_CODE`. The next attempt resumes from the newest checkpoint.

Between steps, too long is `FACTOR` times the median of the last steps, and at least the seconds
given; before `LEAST` steps are known, and in everything that takes long once (compiling, restoring,
evaluating, saving), `PATIENCE` times these. While any process is in such a phase the others wait
for it in a collective: their silence counts from its end. A C timer ends the process should Python
itself be stuck.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

logger = logging.getLogger("ponente.watchdog")

EXIT_CODE = 75  # EX_TEMPFAIL: trying again may help
FACTOR = 20.0
PATIENCE = 30.0
POLL_SECONDS = 2.0
STEPS = 32  # in the median
LEAST = 5  # steps, before which the median says nothing
TELLING_SECONDS = 10.0  # for `on_end`, which may write to the store that the run is stuck at


class Board(Protocol):
    """Where processes leave short texts for each other; none of the calls may wait for long."""

    def put(self, name: str, text: str) -> None:
        """Leave a text, over an older one of that name."""
        ...

    def all(self) -> dict[str, str]:
        """Every text by name."""
        ...


class CoordinationBoard:
    """A board in the coordination service of `jax.distributed`."""

    _PREFIX = "ponente/watchdog/"

    def __init__(self) -> None:
        from jax._src import distributed  # the only way to the service's key-value store

        self._client: Any = distributed.global_state.client

    def put(self, name: str, text: str) -> None:
        """See `Board`."""
        self._client.key_value_set(self._PREFIX + name, text, allow_overwrite=True)

    def all(self) -> dict[str, str]:
        """See `Board`."""
        found = self._client.key_value_dir_get(self._PREFIX)
        return {name.removeprefix(self._PREFIX): text for name, text in found}


_SHORT = ("step", "between steps")  # phases of ordinary steps; every other may take long


@dataclass(frozen=True)
class _Sign:
    """A sign of life: where the process was after how many steps, by the watchdog's clock."""

    phase: str
    step: int
    at: float


class Watchdog:
    """Context in which the process is ended when `beat` and `phase` are silent for too long.

    Args:
        seconds: least silence between two steps that ends the run.
        index: of this process.
        count: of processes.
        board: where processes see each other; None for a single one.
        on_end: called in a thread with the report before the process ends; its errors are ignored,
            and it is not waited for longer than `TELLING_SECONDS`.
        end: ends the process; for tests.
        clock: monotonic seconds; for tests.
    """

    def __init__(
        self,
        seconds: float,
        *,
        index: int = 0,
        count: int = 1,
        board: Board | None = None,
        on_end: Callable[[str], None] | None = None,
        end: Callable[[int], None] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._index = index
        self._count = count
        self._board = board
        self._on_end = on_end
        self._end = end
        self._clock = clock
        # Replaced as a whole: the watching thread never sees a phase with the time of another.
        self._sign = _Sign("starting", 0, clock())
        self._excused = clock()  # until then another process was in a long phase
        self._durations: deque[float] = deque(maxlen=STEPS)
        self._closed = threading.Event()
        self._poll = min(POLL_SECONDS, seconds / 4)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()

    def beat(self, step: int) -> None:
        """`step` steps were begun; the loop is alive."""
        now, last = self._clock(), self._sign
        if last.phase == "step":
            self._durations.append(now - last.at)
        self._sign = _Sign("step", step, now)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Something that is not a step and may take `PATIENCE` times as long."""
        before = self._sign
        self._sign = _Sign(name, before.step, self._clock())
        yield
        # Not "step": the time from here to the next beat is of no step's length.
        after = "between steps" if before.phase == "step" else before.phase
        self._sign = _Sign(after, before.step, self._clock())

    @property
    def limit(self) -> float:
        """Seconds of silence allowed now."""
        return self._allowed(self._sign)

    def _allowed(self, sign: _Sign) -> float:
        if sign.phase not in _SHORT or len(self._durations) < LEAST:
            return PATIENCE * self._seconds
        return max(self._seconds, FACTOR * statistics.median(self._durations))

    def _watch(self) -> None:
        while not self._closed.wait(self._poll):
            sign = self._sign
            silence, allowed = self._clock() - sign.at, self._allowed(sign)
            # Should Python be stuck, nothing here runs: the timer of C dumps stacks and ends it.
            with contextlib.suppress(ValueError, OSError, AttributeError):  # no stderr to write to
                faulthandler.dump_traceback_later(
                    2 * allowed + 60.0, exit=True, file=sys.__stderr__ or sys.stderr
                )
            others = self._exchange(sign, silence)
            if sign.phase in _SHORT and _any_in_long_phase(others):
                self._excused = self._clock()
            silence = min(silence, self._clock() - self._excused)
            if self._closed.is_set():
                faulthandler.cancel_dump_traceback_later()  # perhaps set after the run took it back
                return
            if silence > allowed and sign is self._sign:
                self._finish(_reason(self._index, sign, silence, allowed), others, first=True)
                return
            if (reason := others.get("end")) is not None:
                self._finish(reason, others, first=False)
                return

    def _exchange(self, sign: _Sign, silence: float) -> dict[str, str]:
        """Tell the others where this process is, and hear where they are."""
        if self._board is None:
            return {}
        mine = {"step": sign.step, "phase": sign.phase, "silent": round(silence, 1)}
        try:
            self._board.put(f"process/{self._index}", json.dumps(mine))
            return self._board.all()
        except Exception as error:  # noqa: BLE001 - the service is gone; JAX ends the process for it
            logger.debug("the coordination service does not answer: %s", error)
            return {}

    def _finish(self, reason: str, others: dict[str, str], *, first: bool) -> None:
        if first and self._board is not None:
            with contextlib.suppress(Exception):
                self._board.put("end", reason)
        report = "\n".join(
            [f"watchdog: {reason}; ending process {self._index}", *_where(others), _stacks()]
        )
        logger.critical("%s", report)
        if self._on_end is not None:
            telling = threading.Thread(target=self._tell, args=(report,), daemon=True)
            telling.start()
            telling.join(TELLING_SECONDS)
        for handler in logging.getLogger().handlers:
            handler.flush()
        if self._count > 1:
            # Until the others have read the reason. Process 0 holds the service: it goes last.
            time.sleep(2 * self._poll + (POLL_SECONDS if self._index == 0 else 0.0))
        self._end(EXIT_CODE)

    def _tell(self, report: str) -> None:
        assert self._on_end is not None
        with contextlib.suppress(Exception):
            self._on_end(report)


def _reason(index: int, sign: _Sign, silence: float, allowed: float) -> str:
    return (
        f"process {index} made no progress for {silence:.0f} s in {sign.phase!r} after "
        f"step {sign.step} (allowed: {allowed:.0f} s; TrainConfig.watchdog_seconds)"
    )


def _positions(board: dict[str, str]) -> dict[int, dict[str, Any]]:
    """Step, phase and silence of every process that wrote on the board, by its index."""
    return {
        int(name.removeprefix("process/")): json.loads(text)
        for name, text in board.items()
        if name.startswith("process/")
    }


def _any_in_long_phase(board: dict[str, str]) -> bool:
    return any(at["phase"] not in _SHORT for at in _positions(board).values())


def _where(others: dict[str, str]) -> list[str]:
    """One line a process, and one that names those that are behind."""
    found = _positions(others)
    lines = [
        f"  process {index}: step {at['step']}, in {at['phase']!r}, silent for {at['silent']} s"
        for index, at in sorted(found.items())
    ]
    if found:
        furthest = max(at["step"] for at in found.values())
        behind = [index for index, at in sorted(found.items()) if at["step"] < furthest]
        stuck = f"behind the others: process {', '.join(map(str, behind))}"
        lines.append(f"  {stuck if behind else 'no process is behind the others'}")
    return lines


def _stacks() -> str:
    """The Python stack of every thread of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for identity, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(identity, identity)}:\n{stack}")
    return "\n".join(parts)
