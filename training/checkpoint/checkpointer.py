"""Asynchronous checkpoints: `save` returns once the values are in host memory, not yet stored.

Each checkpoint is a new directory `<directory>/<step:08d>.<attempt>`:

    arrays/            one Zarr 3 array per array, see `training.checkpoint.chunk_grid`
    progress.json      progress of the run: data offset, bytes of the metrics logs, a few numbers
    parts/00001.json   the list of what process 1 wrote, and so on; process 0 writes none
    index.json         written last: all files with checksums, see `training.checkpoint.files`

Every process writes its chunks and then its list in `parts`. Process 0 polls for these lists,
writes the index and has the listener `commit` it. Saving uses no collective, and every wait has a
timeout. A store may be unavailable for a minute: a single failed save is logged and the next one is
made. A second failure in a row raises, and so does that of the last save before `wait`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pipeline.errors import InputError, StorageError, StoreUnavailable, WorkerLost
from pipeline.store import storage
from training.checkpoint import tree_names
from training.checkpoint.chunk_grid import CHUNK_BYTES, chunk_shape
from training.checkpoint.chunks import CheckpointWriter
from training.checkpoint.device_to_host import HostCopies, HostShard
from training.checkpoint.files import (
    INDEX,
    Deadline,
    open_files,
    verify_digest,
    with_digest,
)
from training.config.job import Listener

SAVE_TIMEOUT_SECONDS = 1800.0
PARTS = "parts"
_LONGEST_PAUSE_SECONDS = 1.0
_GRACE_SECONDS = 30.0
_FAILURES = 2  # this many in a row raise
_FINAL = (InputError, WorkerLost)  # permanent: a later save would fail in the same way
_ERRORS = {"passing": StoreUnavailable, "input": InputError, "storage": StorageError}

logger = logging.getLogger(__name__)


class Checkpointer:
    """Writes checkpoints of one run, one at a time, and drops old ones.

    On CPUs it holds one copy of this process's part of the state between saves.

    Args:
        directory: parent directory of the checkpoints: a local path, or a gs:// or s3:// URL.
        listener: in process 0, has to `commit` each complete checkpoint and to `drop` each one
            before it is deleted; event "failed_checkpoint" for a save that the next one follows.
        attempt: part of the names; `save` refuses a path that exists already.
        dropped: from the steps of all committed checkpoints, oldest first, to the indices of those
            to delete.
        existing: sound committed checkpoints of earlier attempts, oldest first.
        chunk_bytes: maximum size of a file, where the array can be cut that finely.

    Attributes:
        committed: (step, path) of the committed checkpoints that are kept, oldest first.
        begun: step of the newest save; 0 before the first.
    """

    def __init__(
        self,
        directory: str,
        listener: Listener | None = None,
        *,
        attempt: str,
        dropped: Callable[[Sequence[int]], Sequence[int]] = lambda steps: (),
        existing: Sequence[tuple[int, str]] = (),
        timeout_seconds: float = SAVE_TIMEOUT_SECONDS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.committed = list(existing)
        self.begun = 0
        self._directory, self._attempt = directory, attempt
        self._listener = listener or Listener()
        self._dropped = dropped
        self._timeout_seconds, self._chunk_bytes = timeout_seconds, chunk_bytes
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._failures = 0
        self._undeleted: list[str] = []

    def path_of(self, step: int) -> str:
        return storage.join(self._directory, f"{step:08d}.{self._attempt}")

    def reserve(self, state: Any) -> None:
        """Start to allocate the host memory for saves of such a state; called once."""
        self._copies.reserve(tree_names.flatten(state))

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> str:
        """Start to write `state`, after `step` steps; return the path of the checkpoint.

        Blocks until the save before has ended and the copy to host memory is done; the arrays may
        then be donated. Every process calls it. The size of `progress` must not grow with the step.
        Raises:
            InputError: the path of the save before existed already, or its values were not finite.
            StorageError: the last two saves failed, or the save in flight does not end in time.
        """
        self._join()
        self._settle(last=False)
        path = self.path_of(step)
        deadline = Deadline(self._timeout_seconds, f"{path}: checkpoint")
        files = open_files(path, deadline)
        content = json.dumps(progress).encode()
        writer = CheckpointWriter(files, describe_with_chunks(state, self._chunk_bytes))
        shards = self._copies.take(tree_names.flatten(state))
        self.begun = step

        def finish() -> None:
            try:
                _write(writer, deadline, shards, step, content)
                if jax.process_index() == 0:
                    self._commit(step, path)
                self.committed.append((step, path))
                self._failures = 0
                self._drop_old()
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                self._error = error
                self._failures += 1

        self._thread = threading.Thread(target=finish, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()
        return path

    def wait(self) -> None:
        """Wait for the save in flight; raises the errors of `save` where the last one failed."""
        self._join()
        self._settle(last=True)

    def _join(self) -> None:
        if self._thread is not None:
            seconds = self._timeout_seconds + _GRACE_SECONDS
            self._thread.join(seconds)
            if self._thread.is_alive():
                raise StorageError(
                    f"{self._directory}: {self._thread.name} did not end in {seconds:g} s; check "
                    "the storage"
                )
            self._thread = None

    def _settle(self, *, last: bool) -> None:
        """Raise a failed save's error if it is permanent, the second in a row or the last one's."""
        error, self._error = self._error, None
        if error is None:
            return
        if isinstance(error, _FINAL):
            raise error
        if last or self._failures >= _FAILURES:
            # `StoreUnavailable` marks a transient error: the engine retries the step.
            kind = StoreUnavailable if isinstance(error, OSError) else StorageError
            raise kind(f"a checkpoint under {self._directory} failed: {error}") from error
        logger.error("checkpoint of step %d failed, training continues: %s", self.begun, error)
        self._listener.event("failed_checkpoint", step=self.begun, reason=str(error))

    def _commit(self, step: int, path: str) -> None:
        try:
            self._listener.commit(step, path)
        except BaseException:
            # The record may have been written, so delete the files only after `drop` removed it.
            with contextlib.suppress(Exception):
                self._listener.drop(step, path)
                _discard(path)
            raise

    def _drop_old(self) -> None:
        committed = [step for step, _ in self.committed]
        for position in reversed(self._dropped(committed)):
            step, path = self.committed[position]
            if jax.process_index() == 0:
                try:
                    self._listener.drop(step, path)
                except (StorageError, OSError) as error:  # the new checkpoint is committed anyway
                    logger.warning("%s: not dropped, will be retried: %s", path, error)
                    continue
                self._undeleted.append(path)
            del self.committed[position]
        for path in tuple(self._undeleted):
            try:
                storage.delete_tree(path)
                self._undeleted.remove(path)
            except (StorageError, OSError) as error:
                logger.warning("%s: not deleted, will be retried: %s", path, error)


def describe_with_chunks(state: Any, chunk_bytes: int) -> dict[str, dict[str, Any]]:
    """Axes, shape, dtype, itemsize and chunk shape of every array of a state, by name."""
    arrays, described = tree_names.flatten(state), tree_names.describe(state)
    for name, entry in described.items():
        array = arrays[name]
        shard, size = array.sharding.shard_shape(array.shape), array.dtype.itemsize
        entry |= {"itemsize": size, "chunk": list(chunk_shape(shard, size, chunk_bytes))}
    return described


def _refuse_existing(path: str) -> None:
    """Raise `InputError` when this process has written to `path` before."""
    marker = path
    if jax.process_count() > 1:  # other processes may have created the directory already
        marker = storage.join(path, INDEX if jax.process_index() == 0 else _part_name())
    if storage.exists(marker):
        raise InputError(f"{marker}: exists already; give every attempt its own name")


def _write(
    writer: CheckpointWriter,
    deadline: Deadline,
    shards: Sequence[HostShard],
    step: int,
    progress: bytes,
) -> None:
    """Write this process's chunks and list them; process 0 writes the index of all lists."""
    path, index, begun = writer.path, jax.process_index(), False
    try:
        _refuse_existing(path)
        begun = True
        writer.write(shards)
        if index == 0:
            writer.complete(progress)
            _gather(writer, deadline)
            writer.write_index(step)
        else:
            storage.write_atomic(storage.join(path, _part_name()), with_digest(writer.written))
    except BaseException as error:
        if index == 0:
            if begun:  # otherwise the files at `path` are another checkpoint's
                _discard(path)
        elif begun or isinstance(error, OSError):  # never replace another checkpoint's list
            with contextlib.suppress(Exception):
                content = with_digest({"error": str(error), "kind": _kind(error)})
                storage.write_atomic(storage.join(path, _part_name()), content)
        raise


def _gather(writer: CheckpointWriter, deadline: Deadline) -> None:
    """Wait until every other process has listed what it wrote, and raise what one of them raised.

    Raises `StoreUnavailable` also where one wrote no list in time.
    """
    path, missing, pause = writer.path, set(range(1, jax.process_count())), 0.02
    while missing:
        listed = set(storage.list_names(storage.join(path, PARTS)))
        for index in sorted(missing):
            if _part_name(index).rpartition("/")[2] not in listed:
                continue
            url = storage.join(path, _part_name(index))
            content, encoded = verify_digest(url, f"what process {index} wrote")
            if "error" in content:
                raise _ERRORS[content["kind"]](f"process {index}: {content['error']}")
            writer.join(content)
            writer.remember(_part_name(index), encoded)
            missing.discard(index)
        if missing:
            try:
                left = deadline.left()
            except StoreUnavailable as error:
                reason = f"processes {sorted(missing)} wrote nothing: {error}"
                raise StoreUnavailable(reason) from error
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _kind(error: BaseException) -> str:
    """Key of an error in `_ERRORS`: process 0 raises that class, which decides about a retry."""
    if isinstance(error, OSError):
        return "passing"
    return "input" if isinstance(error, InputError) else "storage"


def _part_name(index: int | None = None) -> str:
    number = jax.process_index() if index is None else index
    return f"{PARTS}/{number:05d}.json"


def _discard(path: str) -> None:
    """Delete the files of a failed save, as they may have filled the disk."""
    with contextlib.suppress(Exception):
        storage.delete_tree(path)
