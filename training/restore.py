"""Reading checkpoints back, onto any mesh and any number of processes.

Three things are told apart. There is no checkpoint: a run begins at step 0. A checkpoint is damaged
(`DamagedOutput`): the next older one is used and the damage is reported. A checkpoint is sound but
of another model (`InputError`): nothing is cast, padded or initialised to make it fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from pipeline import storage
from pipeline.errors import DamagedOutput, InputError
from training import leaves
from training.checkpoint import arrays_url, handler, orbax
from training.checkpoint_index import HISTORY, read_index, verify_files

Tree = TypeVar("Tree")
logger = logging.getLogger(__name__)


def restore(path: str, like: Tree, *, part: str = "") -> Tree:
    """The arrays of the checkpoint at `path`, shaped and sharded as `like`.

    Every process calls this with the same arguments; each verifies its share of the files.

    Args:
        path: of one checkpoint.
        like: tree of `jax.ShapeDtypeStruct` with shardings.
        part: restore only arrays whose names begin with this ("model."); `like` is that part.

    Raises:
        DamagedOutput: files are missing or changed.
        InputError: the checkpoint's arrays are not those of `like`; names the array.
    """
    index = _agreed(lambda: _verified(path))
    stored = {
        name.removeprefix(part): entry
        for name, entry in index["leaves"].items()
        if name.startswith(part)
    }
    if difference := leaves.mismatch(stored, leaves.describe(like)):
        raise InputError(
            f"{path}: {difference}; the checkpoint is of another model or optimizer configuration"
        )
    target = {part + name: array for name, array in leaves.flatten(like).items()}
    arrays = _read(path, target)
    for name, want in target.items():
        got = arrays[name]
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            raise DamagedOutput(f"{path}: array {name!r} is not what the index says")
    return leaves.unflatten(like, {name.removeprefix(part): arrays[name] for name in target})


def read_history(path: str) -> dict[str, Any]:
    """The history saved with a checkpoint: {"rows": [...], "evaluations": [...]}."""
    try:
        return storage.read_json(storage.join(path, HISTORY))
    except (FileNotFoundError, ValueError) as error:
        raise DamagedOutput(f"{path}: {HISTORY} cannot be read: {error}") from error


def newest_sound(
    checkpoints: Sequence[tuple[int, str]],
    like: Tree,
    on_damage: Callable[[int, str, str], None] | None = None,
) -> tuple[int, str, Tree, dict[str, Any]] | None:
    """The newest sound one of `checkpoints`, (step, path) oldest first.

    Returns:
        Step, path, restored state and history; None when `checkpoints` is empty.

    Raises:
        DamagedOutput: when there are checkpoints and none is sound.
        InputError: when a sound one is of another model.
    """
    for step, path in reversed(checkpoints):
        try:
            state: Any = restore(path, like)
            if int(state.step) != step:
                raise DamagedOutput(f"{path}: expected step {step}, found {int(state.step)}")
            return step, path, state, read_history(path)
        except DamagedOutput as error:
            logger.warning("checkpoint of step %d is damaged, trying an older one: %s", step, error)
            if on_damage is not None:
                on_damage(step, path, str(error))
    if checkpoints:
        raise DamagedOutput(
            f"none of {len(checkpoints)} checkpoints is sound (newest: {checkpoints[-1][1]}); "
            "training does not begin again by itself: delete their records to start at step 0"
        )
    return None


def _verified(path: str) -> dict[str, Any]:
    index = read_index(path)
    verify_files(path, index, jax.process_index(), jax.process_count())
    return index


def _read(path: str, target: dict[str, Any]) -> dict[str, jax.Array]:
    arguments = orbax().args.PyTreeRestore(
        target,
        restore_args=orbax().checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
    )
    try:
        with orbax().Checkpointer(handler()) as reader:
            return reader.restore(arrays_url(path), args=arguments)
    except (ValueError, OSError, KeyError) as error:
        raise DamagedOutput(f"{path}: arrays cannot be read: {str(error)[:300]}") from error


def _agreed(check: Callable[[], Tree]) -> Tree:
    """The result of `check`; raises `DamagedOutput` in every process when it did in one."""
    result, damage = None, None
    try:
        result = check()
    except DamagedOutput as error:
        damage = error
    if jax.process_count() > 1:
        sound = multihost_utils.process_allgather(np.asarray(damage is None))
        if damage is None and not sound.all():
            bad = np.flatnonzero(~sound).tolist()
            raise DamagedOutput(f"processes {bad} found the checkpoint damaged")
    if damage is not None:
        raise damage
    assert result is not None
    return result
