"""Asynchronous checkpoints: `save` returns while the bytes are still being written.

One checkpoint is one new directory `<directory>/<step:08d>.<attempt>` holding `arrays/` (Orbax:
OCDBT + zarr3, every process writes its part), `history.json` and, last, `index.json`. A background
thread waits for the write, writes the index and calls `on_commit(step, path)`; only the record
which that callback writes makes the checkpoint exist for a later run. An error in the background
is raised by the next `save` or `wait`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pipeline import storage
from pipeline.errors import InputError, StorageError
from training import leaves
from training.checkpoint_index import ARRAYS, HISTORY, write_index

Commit = Callable[[int, str], None]
SAVE_TIMEOUT_SECONDS = 1800


def orbax() -> Any:
    """Orbax, imported where it is first needed: it takes as long as a fifth of a first step."""
    import orbax.checkpoint

    return orbax.checkpoint


def handler() -> Any:
    """How arrays are laid out on disk; the same for writing and reading."""
    return orbax().PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)


def arrays_url(path: str) -> str:
    """Where the arrays of the checkpoint at `path` are, absolute as Orbax needs it."""
    return storage.join(storage.normalise(path), ARRAYS)


class Checkpointer:
    """Writes checkpoints of one run, one at a time, and drops old ones.

    Args:
        directory: where checkpoints go.
        attempt: names this run of the trainer; a path that exists already is refused.
        on_commit: called on process 0 when a checkpoint is complete, with (step, path).
        on_drop: called on process 0 before a checkpoint is deleted, with (step, path); forget it.
        keep: checkpoints kept.
        existing: sound committed checkpoints of earlier runs, oldest first; they count as kept.
    """

    def __init__(
        self,
        directory: str,
        *,
        attempt: str,
        on_commit: Commit | None = None,
        on_drop: Commit | None = None,
        keep: int = 2,
        existing: Sequence[tuple[int, str]] = (),
    ) -> None:
        self._directory = directory
        self._attempt = attempt
        self._on_commit = on_commit
        self._on_drop = on_drop
        self._keep = keep
        self._committed = list(existing)
        self._orbax = orbax().AsyncCheckpointer(handler(), timeout_secs=SAVE_TIMEOUT_SECONDS)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def latest(self) -> tuple[int, str] | None:
        """Step and path of the newest committed checkpoint."""
        return self._committed[-1] if self._committed else None

    def save(self, step: int, state: Any, history: dict[str, Any]) -> str:
        """Begin to write `state`; its arrays may be donated as soon as this returns.

        Returns:
            The path the checkpoint will have.

        Raises:
            InputError: when that path exists.
            StorageError: when the previous save failed.
        """
        self.wait()
        path = storage.join(self._directory, f"{step:08d}.{self._attempt}")
        if jax.process_index() == 0 and storage.exists(path):
            raise InputError(f"{path}: exists already; give every run its own attempt")
        described = leaves.describe(state)
        text = json.dumps(history).encode()
        self._orbax.save(arrays_url(path), args=orbax().args.PyTreeSave(leaves.flatten(state)))
        self._thread = threading.Thread(
            target=self._finish, args=(step, path, described, text), name=f"checkpoint-{step}"
        )
        self._thread.start()
        return path

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
            StorageError: when a save failed since the last call.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise StorageError(f"a checkpoint under {self._directory} failed: {error}") from error

    def close(self) -> None:
        """Drain and release Orbax's threads."""
        try:
            self.wait()
        finally:
            self._orbax.close()

    def _finish(self, step: int, path: str, described: dict[str, Any], history: bytes) -> None:
        try:
            self._orbax.wait_until_finished()
            if jax.process_index() == 0:
                storage.write_atomic(storage.join(path, HISTORY), history)
                write_index(path, step, described)
                if self._on_commit is not None:
                    self._on_commit(step, path)
            self._committed.append((step, path))
            self._drop_old()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._error = error

    def _drop_old(self) -> None:
        while len(self._committed) > self._keep:
            step, path = self._committed.pop(0)
            if jax.process_index() == 0:
                if self._on_drop is not None:
                    self._on_drop(step, path)
                storage.delete_tree(path)
