"""Scoring checkpoints as they are committed, beside the training that commits them.

All processes of the group run this loop. In every turn process 0 says what comes next, and all of
them hear it, and whether any of them was asked to stop, in one collective.
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
# What became of a load, by how much it weighs when processes disagree: no error of the store
# makes damage sound.
_READ, _UNAVAILABLE, _DAMAGED = range(3)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Next:
    """What process 0 found: a checkpoint to score, or the end; neither means to look again later.

    Attributes:
        name: what it calls the checkpoint.
        step: of the checkpoint.
        path: of its directory.
        end: nothing more will come.
    """

    name: str = ""
    step: int = 0
    path: str = ""
    end: bool = False


Find = Callable[[], Next]
Keep = Callable[[Next, Scored], None]
Skip = Callable[[Next, str], None]


def follow(scorer: Scorer, find: Find, keep: Keep, skip: Skip) -> bool:
    """Score checkpoints until the end; False when a signal asked to leave before.

    Args:
        scorer: the same in every process.
        find: asked in process 0, again and again, for what is next.
        keep: given every score, in process 0, before `find` is asked again.
        skip: called in process 0 with a checkpoint that cannot be read and why: gone, or damaged.

    Raises:
        StoreUnavailable: the store failed `MOST_FAILED_LOOKS` times, with no answer in between.
    """
    leader = jax.process_index() == 0
    failed = 0
    with _StopRequest() as stop:
        while True:
            found, leave = _agree(find() if leader else Next(), stop())
            if leave or found.end:
                return not leave
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
            if state == _DAMAGED:
                if leader:
                    skip(found, reason)
                continue
            scored = scorer.score(model)
            del model  # before the next one is read
            if leader:
                keep(found, scored)


def _load(scorer: Scorer, path: str) -> tuple[Any, int, str]:
    """The model, what became of the load, and why; agreed on by all processes but for the why."""
    model, state, reason = None, _READ, ""
    try:
        model = scorer.load(path)
    except (CorruptOutput, FileNotFoundError) as error:
        state, reason = _DAMAGED, " ".join(str(error).split())
    except (StorageError, OSError) as error:
        state, reason = _UNAVAILABLE, " ".join(str(error).split())
    if jax.process_count() > 1:
        state = int(multihost_utils.process_allgather(np.asarray(state)).max())
    if state == _READ:
        return model, state, reason
    return None, state, reason or "another process could not read it"


def _agree(found: Next, stop: bool) -> tuple[Next, bool]:
    """What process 0 found, and whether any process was asked to stop."""
    if jax.process_count() == 1:
        return found, stop
    fields = json.dumps([found.name, found.step, found.path, found.end]).encode()
    message = np.zeros(_MESSAGE_BYTES, np.uint8)
    message[: len(fields)] = np.frombuffer(fields, np.uint8)
    message[-1] = stop
    everybody = multihost_utils.process_allgather(message)
    words = json.loads(bytes(everybody[0, :-1]).rstrip(b"\0"))
    return Next(*words), bool(everybody[:, -1].any())


class _StopRequest:
    """Context in which SIGTERM asks to leave instead of ending the process."""

    def __init__(self) -> None:
        # No `threading.Event`: its lock may be held by what the handler interrupts.
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
