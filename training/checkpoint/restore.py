"""Restores checkpoints onto any mesh and any number of processes, or array by array onto none.

Distinguishes three cases. No checkpoint exists: the run begins at step 0. A checkpoint is corrupt
(`CorruptOutput`): the error is reported and the next older one is used. A checkpoint is sound but
of another model (`InputError`): nothing is cast, padded or initialised to make it fit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from models.jax_numerics import random_key
from models.shape.config import TransformerConfig
from models.transformer import Transformer
from pipeline.errors import CorruptOutput, InputError, StorageError, StoreUnavailable
from training.checkpoint import tree_names
from training.checkpoint.chunk_grid import CHUNK_BYTES, Box, chunk_shape
from training.checkpoint.chunks import CheckpointWriter, read_arrays, read_box
from training.checkpoint.device_to_host import HostShard
from training.checkpoint.files import (
    PROGRESS,
    Deadline,
    in_parallel,
    open_files,
    read_index,
)
from training.config.job import Listener
from training.sharding.layout import Layout, make_layout

Tree = TypeVar("Tree")
RESTORE_SECONDS = 1800.0
EXCHANGE_SECONDS = 3600.0  # of an import or export, which also reads or writes other files
# By rising severity; a subclass comes after its base class.
_VERDICTS = (StorageError, OSError, StoreUnavailable, InputError, CorruptOutput)
EMA, MODEL = "ema.", "model."
logger = logging.getLogger(__name__)


def restore(path: str, like: Tree, *, prefix: str = "", step: int | None = None) -> Tree:
    """The arrays of the checkpoint at `path`, shaped and sharded as `like`.

    Every process calls this with the same arguments. Each reads and checks only the values that
    its own devices need, and reads replicated values once. If one process fails, all of them raise.

    `like` has `jax.ShapeDtypeStruct` with shardings. With a prefix ("model.") it has only the
    arrays whose names begin with it. `step` is that which the checkpoint must have, if any.

    Raises:
        CorruptOutput: files are missing or changed, or the checkpoint is of another step.
        InputError: the checkpoint's arrays are not those of `like`; names the array.
    """
    wanted = {prefix + name: entry for name, entry in tree_names.describe(like).items()}
    target = {prefix + name: array for name, array in tree_names.flatten(like).items()}
    index = fail_together(lambda: read_index(path))
    if step is not None and index["step"] != step:
        raise CorruptOutput(f"{path}: expected a checkpoint of step {step}, found {index['step']}")
    leaves = index["leaves"]
    stored = {name: entry for name, entry in leaves.items() if name.startswith(prefix)}
    if difference := tree_names.mismatch(stored, wanted):
        raise InputError(
            f"{path}: {difference}; the checkpoint is of another model, or of another "
            "OptimizerConfig (kind, groups, moment_dtype, Muon's momentum schedule or row_beta), "
            "TrainConfig.ema, average_last or spike_guard"
        )

    def read() -> dict[str, jax.Array]:
        files = open_files(path, Deadline(RESTORE_SECONDS, f"{path}: restoring"))
        # The processes share the work of checking the small files.
        small = index["files"][jax.process_index() :: jax.process_count()]
        in_parallel(lambda file: files.check(*file), small, files.threads)
        return read_arrays(files, leaves, target)

    arrays = fail_together(read)
    return tree_names.unflatten(like, {name.removeprefix(prefix): arrays[name] for name in target})


def read_progress(path: str) -> dict[str, Any]:
    """The `progress` of `Checkpointer.save`; `CorruptOutput` where it is missing or changed."""
    for name, size, sha256 in read_index(path)["files"]:
        if name == PROGRESS:
            files = open_files(path, Deadline(RESTORE_SECONDS, f"{path}: {PROGRESS}"))
            return json.loads(files.check(name, size, sha256))
    raise CorruptOutput(f"{path}: {PROGRESS} is not in the index")


def load_model(checkpoint_path: str, config: TransformerConfig) -> Transformer:
    """The float32 model of a checkpoint, on this process's first device; see `restore_model`."""
    return load_model_onto(make_layout(jax.local_devices()[:1]), checkpoint_path, config)


def load_model_onto(layout: Layout, checkpoint_path: str, config: TransformerConfig) -> Transformer:
    """`load_model` onto the mesh of `layout`; every process of the mesh calls it."""
    shapes = jax.eval_shape(lambda key: Transformer.init(config, key=key), random_key(0))
    return restore_model(checkpoint_path, layout.abstract(shapes))


def restore_model(path: str, like: Transformer) -> Transformer:
    """The model of the checkpoint at `path` as it is published: the EMA where there is one.

    Nothing of the optimizer's state is read. Raises `CorruptOutput` as `restore` does.
    """
    arrays = fail_together(lambda: read_index(path))["leaves"]
    kept = any(name.startswith(EMA) for name in arrays)
    return restore(path, like, prefix=EMA if kept else MODEL)


def newest_sound(
    checkpoints: Sequence[tuple[int, str]],
    like: Tree,
    listener: Listener | None = None,
    read: Callable[[str], dict[str, Any]] = read_progress,
) -> tuple[int, str, Tree, dict[str, Any]] | None:
    """Step, path, state and progress of the newest sound one of `checkpoints`; None of none.

    `checkpoints` are (step, path), oldest first. The listener has an event "corrupt_checkpoint" of
    each corrupt one; `read` gives the progress of the one at a path.

    Raises:
        CorruptOutput: there are checkpoints and none is sound.
    """
    for step, path in reversed(checkpoints):
        try:
            state = restore(path, like, step=step)
            return step, path, state, fail_together(lambda path=path: read(path))
        except CorruptOutput as error:
            logger.warning("checkpoint of step %d is corrupt, trying an older one: %s", step, error)
            fields = {"step": step, "path": path, "reason": str(error)}
            (listener or Listener()).event("corrupt_checkpoint", **fields)
    if checkpoints:
        raise CorruptOutput(
            f"none of {len(checkpoints)} checkpoints is sound (newest: {checkpoints[-1][1]}); "
            "training does not restart by itself: delete their records to start at step 0"
        )
    return None


def fail_together(check: Callable[[], Tree]) -> Tree:
    """The result of `check`; raises in every process when it raised in one.

    Every process raises the same class of error, so that all of them fall back to the older
    checkpoint or all of them end, even when their own errors differ. The most severe error wins: an
    error that is not in `_VERDICTS`, which is a `RuntimeError` in the others, then a corrupt
    checkpoint (no retry repairs it), then the others of `_VERDICTS` from the last to the first.
    """
    result, error = None, None
    try:
        result = check()
    except Exception as raised:  # noqa: BLE001 - the others wait for this process's verdict
        error = raised
    if jax.process_count() > 1:
        kinds = [i for i, kind in enumerate(_VERDICTS, 1) if isinstance(error, kind)]
        mine = 0 if error is None else max(kinds, default=len(_VERDICTS) + 1)
        verdicts = multihost_utils.process_allgather(np.asarray(mine))
        worst = int(verdicts.max())
        if worst and worst != mine:
            kind = _VERDICTS[worst - 1] if worst <= len(_VERDICTS) else RuntimeError
            bad = np.flatnonzero(verdicts == worst).tolist()
            raise kind(
                f"processes {bad} could not read the checkpoint; their logs have the reason"
            ) from error
    if error is not None:
        raise error
    assert result is not None
    return result


def describe_model(config: TransformerConfig) -> dict[str, dict[str, Any]]:
    """Axes, shape and dtype of every array of a model, by its path in a `Transformer`."""
    return tree_names.describe(jax.eval_shape(lambda: Transformer.init(config, key=random_key(0))))


class StoredModel:
    """The parameters of a checkpoint, for reading one part at a time.

    Those are the EMA (`is_ema`) where `ema` is set and the run kept one.
    """

    def __init__(self, path: str, config: TransformerConfig, *, ema: bool = True) -> None:
        leaves = read_index(path)["leaves"]
        self.is_ema = ema and any(name.startswith(EMA) for name in leaves)
        self._prefix = EMA if self.is_ema else MODEL
        self._leaves = {n: e for n, e in leaves.items() if n.startswith(self._prefix)}
        self._files = open_files(path, Deadline(EXCHANGE_SECONDS, f"{path}: reading"))
        wanted = {self._prefix + name: entry for name, entry in describe_model(config).items()}
        if difference := tree_names.mismatch(self._leaves, wanted):
            raise InputError(f"{path}: {difference}; the checkpoint is of another model")

    def read(self, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
        """The values of an array, or of indices [begin, end) of its first axis."""
        entry = self._leaves[self._prefix + name]
        first, *others = ((0, size) for size in entry["shape"])
        box = (rows or first, *others)
        return read_box(self._files, self._prefix + name, entry, box)


class ModelWriter:
    """Writes a checkpoint of parameters only, of step 0, to a path that does not exist yet."""

    def __init__(self, path: str, config: TransformerConfig) -> None:
        self._leaves: dict[str, dict[str, Any]] = {
            MODEL + name: {**entry, "itemsize": 4, "chunk": _chunk(name, entry["shape"])}
            for name, entry in describe_model(config).items()
        }
        files = open_files(path, Deadline(EXCHANGE_SECONDS, f"{path}: writing"))
        self._writer = CheckpointWriter(files, self._leaves)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._leaves[MODEL + name]["shape"])

    def write(self, name: str, values: np.ndarray, rows: tuple[int, int]) -> None:
        """Write finite float32 values of indices [begin, end) of an array's first axis, once."""
        entry = self._leaves[MODEL + name]
        box: Box = (rows, *((0, size) for size in entry["shape"][1:]))
        self._writer.write([HostShard(MODEL + name, box, values)])

    def finish(self) -> None:
        """Complete the checkpoint. Raises `StorageError` when rows are missing."""
        self._writer.complete(b"{}")
        self._writer.write_index(0)


def _chunk(name: str, shape: Iterable[int]) -> list[int]:
    """Chunk shape; chunks of stacked layers do not span layers, which are written one by one."""
    first, *others = shape
    written = (1 if name.startswith("blocks.") else first, *others)
    return list(chunk_shape(written, 4, CHUNK_BYTES))
