"""Scores checkpoints as a concurrent training run commits them.

All processes of the group run this loop. In every iteration process 0 looks for the next
checkpoint, and one all-gather shares its result and whether any process was asked to stop.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from pipeline.errors import CorruptOutput, StorageError, StoreUnavailable
from training.evaluate.checkpoint_scorer import Scored, Scorer

LOOK_SECONDS = 1.0
MOST_FAILED_LOOKS = 5
_MESSAGE_BYTES = 4096
# Result of a load. The maximum over processes wins: a corrupt file is not repaired by a retry, even
# where another process only met a transient error.
_READ, _UNAVAILABLE, _CORRUPT = range(3)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Next:
    """What process 0 found: a checkpoint to score, the end, or neither (poll again later).

    Attributes:
        name: name of the checkpoint.
        step: its step.
        path: path of its directory.
        end: no more checkpoints will come.
    """

    name: str = ""
    step: int = 0
    path: str = ""
    end: bool = False


Find = Callable[[], Next]
Keep = Callable[[Next, Scored], None]
Skip = Callable[[Next, str], None]


def follow(scorer: Scorer, find: Find, keep: Keep, skip: Skip) -> bool:
    """Score checkpoints until the end; False when SIGTERM cancelled the loop before.

    Args:
        scorer: the same in every process.
        find: returns the next checkpoint; called repeatedly in process 0.
        keep: stores a score; called in process 0, before the next call of `find`.
        skip: called in process 0 with a checkpoint that is missing or corrupt, and the reason.

    Raises:
        StoreUnavailable: the store failed `MOST_FAILED_LOOKS` times in a row.
    """
    leader = jax.process_index() == 0
    failed = 0
    with _StopRequest() as stop:
        while True:
            found, cancelled = _share(find() if leader else Next(), stop())
            if cancelled or found.end:
                return not cancelled
            if not found.path:
                time.sleep(LOOK_SECONDS)
                continue
            model, state, reason = _load(scorer, found.path)
            failed = failed + 1 if state == _UNAVAILABLE else 0
            if failed == MOST_FAILED_LOOKS:
                raise StoreUnavailable(f"{found.path}: failed {failed} times in a row: {reason}")
            if state == _UNAVAILABLE:
                logger.warning("%s: will be read again: %s", found.path, reason)
                time.sleep(LOOK_SECONDS)
                continue
            if state == _CORRUPT:
                if leader:
                    skip(found, reason)
                continue
            scored = scorer.score(model)
            del model  # free its memory before the next one is read
            if leader:
                keep(found, scored)


def _load(scorer: Scorer, path: str) -> tuple[Any, int, str]:
    """(model or None, result, reason); the result is the same in all processes."""
    model, state, reason = None, _READ, ""
    try:
        model = scorer.load(path)
    except (CorruptOutput, FileNotFoundError) as error:
        state, reason = _CORRUPT, " ".join(str(error).split())
    except (StorageError, OSError) as error:
        state, reason = _UNAVAILABLE, " ".join(str(error).split())
    if jax.process_count() > 1:
        state = int(multihost_utils.process_allgather(np.asarray(state)).max())
    if state == _READ:
        return model, state, reason
    return None, state, reason or "another process could not read it"


def _share(found: Next, stop: bool) -> tuple[Next, bool]:
    """What process 0 found, and whether any process was asked to stop, in all processes."""
    if jax.process_count() == 1:
        return found, stop
    fields = json.dumps([found.name, found.step, found.path, found.end]).encode()
    message = np.zeros(_MESSAGE_BYTES, np.uint8)
    message[: len(fields)] = np.frombuffer(fields, np.uint8)
    message[-1] = stop
    messages = multihost_utils.process_allgather(message)
    words = json.loads(bytes(messages[0, :-1]).rstrip(b"\0"))
    return Next(*words), bool(messages[:, -1].any())


class _StopRequest:
    """Context in which SIGTERM sets a flag instead of ending the process."""

    def __init__(self) -> None:
        # Not a `threading.Event`: the handler may interrupt code that holds the event's lock.
        self._requested = False
        self._old: Any = None

    def __call__(self) -> bool:
        return self._requested

    def __enter__(self) -> _StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._old = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._old is not None:
            signal.signal(signal.SIGTERM, self._old)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
