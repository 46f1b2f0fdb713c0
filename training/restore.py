"""Reading checkpoints back, onto any mesh and any number of processes.

Three things are told apart. There is no checkpoint: a run begins at step 0. A checkpoint is damaged
(`CorruptOutput`): the next older one is used and the damage is reported. A checkpoint is sound but
of another model (`InputError`): nothing is cast, padded or initialised to make it fit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from pipeline.errors import CorruptOutput, InputError, StorageError, StoreUnavailable
from training import leaves
from training.checkpoint_chunks import read_arrays
from training.checkpoint_files import Deadline, in_parallel, open_files
from training.checkpoint_index import HISTORY, check_file, read_index

Tree = TypeVar("Tree")
RESTORE_TIMEOUT_SECONDS = 1800.0
_KINDS = (CorruptOutput, StoreUnavailable, StorageError, InputError)  # the first that fits
_DESCRIBED = ("axes", "shape", "dtype")
logger = logging.getLogger(__name__)


def restore(path: str, like: Tree, *, part: str = "", step: int | None = None) -> Tree:
    """The arrays of the checkpoint at `path`, shaped and sharded as `like`.

    Every process calls this with the same arguments. Each reads and checks what its own devices
    need, once however many of them hold it, and all agree on whether it was sound.

    Args:
        path: of one checkpoint.
        like: tree of `jax.ShapeDtypeStruct` with shardings.
        part: restore only arrays whose names begin with this ("model."); `like` is that part.
        step: that it must be of; None for any.

    Raises:
        CorruptOutput: files are missing or changed, or the checkpoint is of another step.
        InputError: the checkpoint's arrays are not those of `like`; names the array.
        StorageError: the store failed.
    """
    wanted = {part + name: entry for name, entry in leaves.describe(like).items()}
    target = {part + name: array for name, array in leaves.flatten(like).items()}
    arrays = _restored(path, wanted, target, part, step)
    return leaves.unflatten(like, {name.removeprefix(part): arrays[name] for name in target})


def read_history(path: str) -> dict[str, Any]:
    """The history saved with a checkpoint: {"rows": [...], "evaluations": [...]}.

    Raises:
        CorruptOutput: it is missing or changed.
    """
    for name, size, sha256 in read_index(path)["files"]:
        if name == HISTORY:
            files = open_files(path, Deadline(RESTORE_TIMEOUT_SECONDS, f"{path}: {HISTORY}"))
            return json.loads(check_file(path, files, name, size, sha256))
    raise CorruptOutput(f"{path}: {HISTORY} is not in the index")


def newest_sound(
    checkpoints: Sequence[tuple[int, str]],
    like: Tree,
    on_damage: Callable[[int, str, str], None] | None = None,
) -> tuple[int, str, Tree, dict[str, Any]] | None:
    """The newest sound one of `checkpoints`, (step, path) oldest first.

    Returns:
        Step, path, restored state and history; None when `checkpoints` is empty.

    Raises:
        CorruptOutput: when there are checkpoints and none is sound.
        InputError: when a sound one is of another model.
    """
    for step, path in reversed(checkpoints):
        try:
            state = restore(path, like, step=step)
            return step, path, state, agreed(lambda path=path: read_history(path))
        except CorruptOutput as error:
            logger.warning("checkpoint of step %d is damaged, trying an older one: %s", step, error)
            if on_damage is not None:
                on_damage(step, path, str(error))
    if checkpoints:
        raise CorruptOutput(
            f"none of {len(checkpoints)} checkpoints is sound (newest: {checkpoints[-1][1]}); "
            "training does not begin again by itself: delete their records to start at step 0"
        )
    return None


def _restored(
    path: str,
    wanted: dict[str, Any],
    target: dict[str, Any],
    part: str,
    step: int | None,
) -> dict[str, jax.Array]:
    """The arrays `target`, when the checkpoint's arrays of that part are those `wanted`."""
    index = agreed(lambda: read_index(path))
    if step is not None and index["step"] != step:
        raise CorruptOutput(f"{path}: expected a checkpoint of step {step}, found {index['step']}")
    stored = {
        name: {field: entry[field] for field in _DESCRIBED}
        for name, entry in index["leaves"].items()
        if name.startswith(part)
    }
    if difference := leaves.mismatch(stored, wanted):
        raise InputError(
            f"{path}: {difference}; the checkpoint is of another model or optimizer configuration"
        )

    def read() -> dict[str, jax.Array]:
        files = open_files(path, Deadline(RESTORE_TIMEOUT_SECONDS, f"{path}: restoring"))
        small = index["files"][jax.process_index() :: jax.process_count()]
        in_parallel(lambda file: check_file(path, files, *file), small, files.threads)
        return read_arrays(path, files, index["leaves"], target)

    return agreed(read)


def agreed(check: Callable[[], Tree]) -> Tree:
    """The result of `check`; raises in every process when it raised in one."""
    result, error = None, None
    try:
        result = check()
    except _KINDS as raised:
        error = raised
    if jax.process_count() > 1:
        # 0 is none of them.
        own = next((i for i, kind in enumerate(_KINDS, 1) if isinstance(error, kind)), 0)
        found = multihost_utils.process_allgather(np.asarray(own))
        if error is None and found.any():
            bad = np.flatnonzero(found).tolist()
            kind = _KINDS[int(found[bad[0]]) - 1]
            raise kind(f"processes {bad} could not read the checkpoint; their logs say why")
    if error is not None:
        raise error
    assert result is not None
    return result
