"""Asynchronous checkpoints: `save` returns when the values are copied, long before they are stored.

One checkpoint is one new directory `<directory>/<step:08d>.<attempt>`:

    arrays/            a Zarr 3 array each, see `training.checkpoint.chunk_grid`
    progress.json      where the run was: data offset and bytes of the metrics logs, a few numbers
    parts/00001.json   what process 1 wrote, and so on; of process 0 there is none
    index.json         last: all of it, with checksums, see `training.checkpoint.index`

Every process writes its own chunks and says so through the store; process 0 waits for the others
there, writes the index and calls `on_commit(step, path)`; only the record which that callback
writes makes the checkpoint exist for a later run. No process meets another in a collective, and
every wait has an end.

A store may fail for a minute: a single failed save is logged and the next one made. A second in a
row is an error, and so is the last save before `wait`.
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
from training.checkpoint.chunk_grid import CHUNK_BYTES, chunk_shape, metadata, metadata_file
from training.checkpoint.chunks import write_chunks
from training.checkpoint.device_to_host import HostCopies, HostShard
from training.checkpoint.files import Deadline, Files, open_files
from training.checkpoint.index import (
    INDEX,
    PROGRESS,
    WrittenChunks,
    verify_digest,
    with_digest,
    write_index,
)
from training.checkpoint.retention import Retention

Commit = Callable[[int, str], None]
Failure = Callable[[int, str], None]
SAVE_TIMEOUT_SECONDS = 1800.0
PARTS = "parts"
_LONGEST_PAUSE_SECONDS = 1.0
_GRACE_SECONDS = 30.0
_FAILURES = 2  # in a row, that are an error
_FINAL = (InputError, WorkerLost)  # no later save can do better
_ERRORS = {"passing": StoreUnavailable, "input": InputError, "storage": StorageError}

logger = logging.getLogger(__name__)


class Checkpointer:
    """Writes checkpoints of one run, one at a time, and drops old ones.

    On CPUs it holds one copy of this process's part of the state between saves.

    Args:
        directory: where checkpoints go: a local path or a URL of gs:// or s3://.
        attempt: names this run of the trainer; a path that exists already is refused.
        on_commit: called on process 0 when a checkpoint is complete, with (step, path).
        on_drop: called on process 0 before a checkpoint is deleted, with (step, path); forget it.
        on_failure: called by `save` with step and reason of an earlier one that failed.
        retention: which ones are kept.
        existing: sound committed checkpoints of earlier runs, oldest first; they count as kept.
        timeout_seconds: longest time from one save to its commit.
        chunk_bytes: of one file at most, where an array can be cut so.
    """

    def __init__(
        self,
        directory: str,
        *,
        attempt: str,
        on_commit: Commit | None = None,
        on_drop: Commit | None = None,
        on_failure: Failure | None = None,
        retention: Retention | None = None,
        existing: Sequence[tuple[int, str]] = (),
        timeout_seconds: float = SAVE_TIMEOUT_SECONDS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._directory = directory
        self._attempt = attempt
        self._on_commit = on_commit
        self._on_drop = on_drop
        self._on_failure = on_failure
        self._retention = retention or Retention()
        self._committed = list(existing)
        self._timeout_seconds = timeout_seconds
        self._chunk_bytes = chunk_bytes
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._begun = 0
        self._failures = 0

    @property
    def latest(self) -> tuple[int, str] | None:
        """Step and path of the newest committed checkpoint."""
        return self._committed[-1] if self._committed else None

    @property
    def committed(self) -> list[tuple[int, str]]:
        """Step and path of every committed checkpoint that was kept, oldest first."""
        return list(self._committed)

    @property
    def begun(self) -> int:
        """Step of the newest save that was begun; 0 before the first."""
        return self._begun

    def path_of(self, step: int) -> str:
        """Where a checkpoint of `step` goes."""
        return storage.join(self._directory, f"{step:08d}.{self._attempt}")

    def reserve(self, state: Any) -> None:
        """Begin to take the host memory for saves of such a state, while others do something."""
        self._copies.reserve(tree_names.flatten(state))

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> str:
        """Begin to write `state`; its arrays may be donated as soon as this returns.

        Waits for an earlier save to end and for the copy to host memory. Every process calls it.

        Args:
            step: of the run.
            state: tree of arrays.
            progress: JSON values, small whatever the step.

        Returns:
            The path the checkpoint will have.

        Raises:
            InputError: when the path last saved to existed, or what was saved was not finite.
            StorageError: when the last saves failed, or the one under way does not end in time.
        """
        self._join()
        self._tell_failure()
        path = self.path_of(step)
        deadline = Deadline(self._timeout_seconds, f"{path}: checkpoint")
        files = open_files(path, deadline)
        content = json.dumps(progress).encode()
        described = describe(state, self._chunk_bytes)
        shards = self._copies.take(tree_names.flatten(state))
        self._begun = step

        def finish() -> None:
            try:
                written = _write(path, files, deadline, shards, described, content)
                if written is not None:
                    self._commit(step, path, described, written)
                self._committed.append((step, path))
                self._failures = 0
                self._drop_old()
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                self._error = error
                self._failures += 1

        self._thread = threading.Thread(target=finish, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()
        return path

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            StorageError: when the last save failed, or does not end in time.
            InputError: when its path existed already, or what was to be saved was not finite.
        """
        self._join()
        self._raise_failure()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join(self._timeout_seconds + _GRACE_SECONDS)
            if self._thread.is_alive():
                raise StorageError(
                    f"{self._directory}: {self._thread.name} did not end in "
                    f"{self._timeout_seconds + _GRACE_SECONDS:g} s; check the storage"
                )
            self._thread = None

    def _tell_failure(self) -> None:
        """Of one save that failed; raises where that is no store's passing trouble."""
        if self._error is None:
            return
        if isinstance(self._error, _FINAL) or self._failures >= _FAILURES:
            self._raise_failure()
        error, self._error = self._error, None
        logger.error("checkpoint of step %d failed, the next is tried: %s", self._begun, error)
        if self._on_failure is not None:
            self._on_failure(self._begun, str(error))

    def _raise_failure(self) -> None:
        if self._error is None:
            return
        error, self._error = self._error, None
        if isinstance(error, _FINAL):
            raise error
        # An `OSError` stays one, so that the step is retried.
        kind = StoreUnavailable if isinstance(error, OSError) else StorageError
        raise kind(f"a checkpoint under {self._directory} failed: {error}") from error

    def close(self) -> None:
        """Drain."""
        self.wait()

    def _commit(
        self, step: int, path: str, described: dict[str, Any], written: WrittenChunks
    ) -> None:
        try:
            write_index(path, step, described, written)
        except BaseException:
            _discard(path)
            raise
        if self._on_commit is None:
            return
        try:
            self._on_commit(step, path)
        except BaseException:
            # Whether a record was made is not known: only what is forgotten may be deleted.
            if self._on_drop is not None:
                with contextlib.suppress(Exception):
                    self._on_drop(step, path)
                    _discard(path)
            raise

    def _drop_old(self) -> None:
        dropped = self._retention.dropped([step for step, _ in self._committed])
        for position in reversed(dropped):
            step, path = self._committed[position]
            if jax.process_index() == 0:
                try:
                    if self._on_drop is not None:
                        self._on_drop(step, path)
                    storage.delete_tree(path)
                except (StorageError, OSError) as error:  # the new one is there all the same
                    logger.warning("%s: could not be deleted, tried again later: %s", path, error)
                    continue
            del self._committed[position]


def describe(state: Any, chunk_bytes: int) -> dict[str, dict[str, Any]]:
    """Axes, shape, dtype, bytes of a value and chunk shape of every array of a state."""
    arrays = tree_names.flatten(state)
    return {
        name: {
            **entry,
            "itemsize": arrays[name].dtype.itemsize,
            "chunk": list(
                chunk_shape(
                    arrays[name].sharding.shard_shape(arrays[name].shape),
                    arrays[name].dtype.itemsize,
                    chunk_bytes,
                )
            ),
        }
        for name, entry in tree_names.describe(state).items()
    }


def _refuse_existing(path: str) -> None:
    """Raise `InputError` when this process has written to `path` before."""
    mark = path
    if jax.process_count() > 1:  # the others may have begun already
        mark = storage.join(path, INDEX if jax.process_index() == 0 else _part_name())
    if storage.exists(mark):
        raise InputError(f"{mark}: exists already; give every run its own attempt")


def _write(
    path: str,
    files: Files,
    deadline: Deadline,
    shards: Sequence[HostShard],
    described: dict[str, Any],
    progress: bytes,
) -> WrittenChunks | None:
    """Write this process's share; in process 0, returns what all have written."""
    index, begun = jax.process_index(), False
    try:
        _refuse_existing(path)
        begun = True
        written = write_chunks(files, shards, described)
        if index == 0:
            for name, entry in described.items():
                written.add_file(files, metadata_file(name), metadata(entry))
            written.add_file(files, PROGRESS, progress)
            _gather(path, deadline, written)
            return written
        storage.write_atomic(storage.join(path, _part_name()), with_digest(written.to_json()))
        return None
    except BaseException as error:
        if index == 0:
            if begun:  # nothing that others wrote is deleted
                _discard(path)
        elif begun or isinstance(error, OSError):
            with contextlib.suppress(Exception):
                content = with_digest({"error": str(error), "kind": _kind(error)})
                storage.write_atomic(storage.join(path, _part_name()), content)
        raise


def _gather(path: str, deadline: Deadline, written: WrittenChunks) -> None:
    """Wait until every other process has listed what it wrote.

    Raises:
        InputError: one of them refused what was to be saved.
        StorageError: one of them failed.
        StoreUnavailable: one of them failed for a reason that may pass, or did not answer in time.
    """
    missing = set(range(1, jax.process_count()))
    pause = 0.02
    while missing:
        listed = set(storage.list_names(storage.join(path, PARTS)))
        for index in sorted(missing):
            if _part_name(index).rpartition("/")[2] not in listed:
                continue
            url = storage.join(path, _part_name(index))
            content = verify_digest(url, f"what process {index} wrote")
            if "error" in content:
                raise _ERRORS[content["kind"]](f"process {index}: {content['error']}")
            written.join(WrittenChunks.from_json(content))
            written.remember(_part_name(index), storage.read_bytes(url))
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
    """What an error is to the others, who need to know whether trying again may help."""
    if isinstance(error, OSError):
        return "passing"
    return "input" if isinstance(error, InputError) else "storage"


def _part_name(index: int | None = None) -> str:
    number = jax.process_index() if index is None else index
    return f"{PARTS}/{number:05d}.json"


def _discard(path: str) -> None:
    """Delete what became no checkpoint, so that a full disk has room again."""
    with contextlib.suppress(Exception):
        storage.delete_tree(path)
