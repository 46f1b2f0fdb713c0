"""Scores checkpoints as a concurrent training run commits them.

All processes of the group run this loop. In every iteration process 0 looks for the next
checkpoint, and one all-gather shares its result and whether any process was asked to stop.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import multihost_utils

from pipeline.errors import CorruptOutput, StorageError, StoreUnavailable
from training.evaluate.checkpoint_scorer import Scored, Scorer
from training.fault.preemption import StopSignal

LOOK_SECONDS = 1.0
MOST_FAILED_LOOKS = 5
_MESSAGE_BYTES = 4096
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Next:
    """What process 0 found: a checkpoint to score, the end, or neither (poll again later)."""

    name: str = ""
    step: int = 0
    path: str = ""
    end: bool = False


Find = Callable[[], Next]
Keep = Callable[[Next, Scored], None]
Skip = Callable[[Next, str], None]


def follow(scorer: Scorer, find: Find, keep: Keep, skip: Skip) -> bool:
    """Score checkpoints until the end; False when SIGTERM cancelled the loop before.

    Process 0 calls `find` repeatedly for the next checkpoint, `keep` with its scores before it
    calls `find` again, and `skip` with one that is missing or corrupt, and the reason.

    Raises:
        StoreUnavailable: the store failed `MOST_FAILED_LOOKS` times in a row.
    """
    leader = jax.process_index() == 0
    failed = 0
    # Every process notes its own signal, and `_share` tells the others.
    with StopSignal(many_processes=False) as stop:
        while True:
            found, cancelled = _share(find() if leader else Next(), stop.requested())
            if cancelled or found.end:
                return not cancelled
            if not found.path:
                time.sleep(LOOK_SECONDS)
                continue
            try:  # if one process cannot read a checkpoint, all of them raise the same class
                model = scorer.load(found.path)
            except CorruptOutput as error:
                failed = 0
                if leader:
                    skip(found, " ".join(str(error).split()))
                continue
            except (StorageError, OSError) as error:
                failed += 1
                if failed == MOST_FAILED_LOOKS:
                    raise StoreUnavailable(
                        f"{found.path}: failed {failed} times in a row: {error}"
                    ) from error
                logger.warning("%s: will be read again: %s", found.path, error)
                time.sleep(LOOK_SECONDS)
                continue
            failed = 0
            scored = scorer.score(model)
            del model  # free its memory before the next one is read
            if leader:
                keep(found, scored)


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
