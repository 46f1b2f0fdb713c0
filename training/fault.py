"""Ends a run in time: on SIGTERM, and when it makes no progress.

A spot machine gets SIGTERM some 30 seconds before it is preempted. In one process a handler sets a
flag that the loop reads between steps. When any of many gets the signal, JAX's coordination service
reports it in all of them at the same step. A second signal has no effect, also while the process
exits.

JAX detects a process that died (`training.sharding.distributed`), but not one that is alive and
never enters a collective (https://github.com/jax-ml/jax/issues/38503). A thread in every process
therefore measures the time since the loop's last heartbeat. After the timeout it

1. posts the reason in the coordination service, so that the other processes end within seconds too,
2. logs where each process was, which of them are behind, and the stack of every thread,
3. ends the process with `EXIT_CODE`. The next attempt resumes from the newest checkpoint.

Between steps the timeout is `FACTOR` times the median duration of the last steps, and at least
`seconds`. Before `LEAST` steps are known, and in long phases (compiling, restoring, evaluating,
saving), it is `PATIENCE` times `seconds`; while the loop waits for a batch, at least
`DATA_SECONDS`, since a store may be silent for so long. While any process is in a long phase or
waits for a batch, the others wait for it in a collective, so their time without progress counts
from its end. If Python itself is blocked, a C timer ends the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from jax.experimental import multihost_utils

from data.cache.shard_io import RETRY_SECONDS, TIMEOUT_S

logger = logging.getLogger("ponente.watchdog")


class StopSignal:
    """Context in which SIGTERM requests a stop of the loop instead of ending the process."""

    def __init__(self, *, many_processes: bool) -> None:
        self._many = many_processes
        self._calls = 0
        # Not a `threading.Event`: the code that the handler interrupts may hold its lock.
        self._stopping = False
        self._old: Any = None

    def __enter__(self) -> StopSignal:
        if not self._many:
            if threading.current_thread() is threading.main_thread():
                self._old = signal.signal(signal.SIGTERM, self._on_signal)
            else:
                logger.info("not in the main thread: SIGTERM will not write a checkpoint")
        return self

    def __exit__(self, *_: object) -> None:
        # The default handler would let a second SIGTERM end the process before it has reported its
        # preemption, so ours stays.
        leaving = self._stopping and self._old is signal.SIG_DFL
        if self._old is not None and not leaving:
            signal.signal(signal.SIGTERM, self._old)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    def requested(self) -> bool:
        """Whether to stop now; stays True once it was True.

        With many processes, all must call it equally often and at the same points of the loop.
        """
        if self._many and not self._stopping:
            self._calls += 1
            if multihost_utils.reached_preemption_sync_point(self._calls):
                self._stopping = True
        return self._stopping

    @property
    def alone(self) -> bool:
        """Whether to stop now, without asking other processes."""
        return not self._many and self._stopping


EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: a retry may help
FACTOR = 20.0
PATIENCE = 30.0
POLL_SECONDS = 2.0
STEPS = 32  # steps in the median
LEAST = 5  # steps before the median is used
DATA_SECONDS = TIMEOUT_S + 2 * RETRY_SECONDS
"""Longer than one request of the loader takes to fail: its timeout, and its retries before."""
ON_END_SECONDS = 10.0  # limit of `on_end`, which may write to the store that blocks the run


class Board:
    """Short texts by name, shared by the processes through JAX's coordination service."""

    _PREFIX = "ponente/watchdog/"

    def __init__(self) -> None:
        from jax._src import distributed  # no public API for the service's key-value store

        self._client: Any = distributed.global_state.client

    def put(self, name: str, text: str) -> None:
        self._client.key_value_set(self._PREFIX + name, text, allow_overwrite=True)

    def all(self) -> dict[str, str]:
        found = self._client.key_value_dir_get(self._PREFIX)
        return {name.removeprefix(self._PREFIX): text for name, text in found}


_STEP_PHASES = ("step", "between steps")  # every other phase is a long one
_DATA = "waiting for a batch"


@dataclass(frozen=True)
class _Heartbeat:
    """When the loop last reported: its phase, steps begun, and the watchdog's clock."""

    phase: str
    step: int
    at: float


class Watchdog:
    """Context that ends the process when neither `beat` nor `phase` is called for too long.

    `board` is None for a single process. `on_end` is called in a thread with the report before the
    process ends; its errors are ignored, and the watchdog waits at most `ON_END_SECONDS` for it.
    `end` and `clock` are for tests.
    """

    def __init__(
        self,
        seconds: float,
        *,
        index: int = 0,
        count: int = 1,
        board: Board | None = None,
        on_end: Callable[[str], None] = lambda report: None,
        end: Callable[[int], None] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._index, self._count = seconds, index, count
        self._board, self._on_end, self._end, self._clock = board, on_end, end, clock
        # Replaced as a whole: the watching thread never reads a phase with another phase's time.
        self._heartbeat = _Heartbeat("starting", 0, clock())
        self._others_long_until = clock()  # when another process was last in a long phase
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
        """Record a heartbeat after `step` steps were begun."""
        now, last = self._clock(), self._heartbeat
        if last.phase == "step":
            self._durations.append(now - last.at)
        self._heartbeat = _Heartbeat("step", step, now)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context for a phase that is not a step; its timeout is `PATIENCE` times `seconds`."""
        before = self._heartbeat
        self._heartbeat = _Heartbeat(name, before.step, self._clock())
        yield
        # Not "step": the time from here to the next beat is not the duration of a step.
        after = "between steps" if before.phase == "step" else before.phase
        self._heartbeat = _Heartbeat(after, before.step, self._clock())

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context for the wait for a batch, a part of the step that it is in."""
        before = self._heartbeat
        self._heartbeat = dataclasses.replace(before, phase=_DATA)
        try:
            yield
        finally:
            self._heartbeat = before

    def _timeout(self, heartbeat: _Heartbeat) -> float:
        if heartbeat.phase not in (*_STEP_PHASES, _DATA) or len(self._durations) < LEAST:
            return PATIENCE * self._seconds
        least = DATA_SECONDS if heartbeat.phase == _DATA else 0.0
        return max(self._seconds, FACTOR * statistics.median(self._durations), least)

    def _watch(self) -> None:
        while not self._closed.wait(self._poll):
            heartbeat = self._heartbeat
            idle, allowed = self._clock() - heartbeat.at, self._timeout(heartbeat)
            # If Python is blocked, this thread does not run: the C timer dumps stacks and exits.
            with contextlib.suppress(ValueError, OSError, AttributeError):  # no stderr to write to
                faulthandler.dump_traceback_later(
                    2 * allowed + 60.0, exit=True, file=sys.__stderr__ or sys.stderr
                )
            others = self._exchange(heartbeat, idle)
            if heartbeat.phase in _STEP_PHASES and any(
                at["phase"] not in _STEP_PHASES for at in _progress(others).values()
            ):
                self._others_long_until = self._clock()
            idle = min(idle, self._clock() - self._others_long_until)
            if self._closed.is_set():
                # The timer may have been set above after `__exit__` cancelled it.
                faulthandler.cancel_dump_traceback_later()
                return
            if idle > allowed and heartbeat is self._heartbeat:
                reason = (
                    f"process {self._index} made no progress for {idle:.0f} s in "
                    f"{heartbeat.phase!r} after step {heartbeat.step} (allowed: {allowed:.0f} s; "
                    "TrainConfig.watchdog_seconds)"
                )
                self._finish(reason, others, first=True)
                return
            if (reason := others.get("end")) is not None:
                self._finish(reason, others, first=False)
                return

    def _exchange(self, heartbeat: _Heartbeat, idle: float) -> dict[str, str]:
        """Post this process's progress; returns the whole board."""
        if self._board is None:
            return {}
        mine = {"step": heartbeat.step, "phase": heartbeat.phase, "idle": round(idle, 1)}
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
        header = f"watchdog: {reason}; ending process {self._index}"
        report = "\n".join([header, *_progress_lines(others), _stacks()])
        logger.critical("%s", report)
        callback = threading.Thread(target=self._call_on_end, args=(report,), daemon=True)
        callback.start()
        callback.join(ON_END_SECONDS)
        for handler in logging.getLogger().handlers:
            handler.flush()
        if self._count > 1:
            # Give the others time to read the reason. Process 0 hosts the service, so it ends last.
            time.sleep(2 * self._poll + (POLL_SECONDS if self._index == 0 else 0.0))
        self._end(EXIT_CODE)

    def _call_on_end(self, report: str) -> None:
        with contextlib.suppress(Exception):
            self._on_end(report)


def _progress(board: dict[str, str]) -> dict[int, dict[str, Any]]:
    """Step, phase and seconds without progress of every process on the board, by index."""
    return {
        int(name.removeprefix("process/")): json.loads(text)
        for name, text in board.items()
        if name.startswith("process/")
    }


def _progress_lines(board: dict[str, str]) -> list[str]:
    """One line for each process, and one that names the processes that are behind."""
    found = dict(sorted(_progress(board).items()))
    furthest = max((at["step"] for at in found.values()), default=0)
    lines = [
        f"  process {index}: step {at['step']}, in {at['phase']!r}, idle for {at['idle']} s"
        for index, at in found.items()
    ]
    behind = ", ".join(str(index) for index, at in found.items() if at["step"] < furthest)
    last = f"behind the others: process {behind}" if behind else "no process is behind the others"
    return [*lines, f"  {last}"] if found else []


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(identity, identity)}:\n{''.join(traceback.format_stack(frame))}"
        for identity, frame in sys._current_frames().items()
    )
