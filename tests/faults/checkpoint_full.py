"""Fault 20, checkpoints: the disk is full at some byte of a save.

A checkpoint is committed; then all space but some is taken and another is saved. That one is
`StorageError` and no checkpoint, the first restores, and with space again the same save succeeds.
Where no file system can be mounted, this process may write no file beyond some size instead.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from pipeline.errors import StorageError
from pipeline.store import local_storage, storage
from pipeline.store.ledger import Ledger
from pipeline.store.shards import File
from tests.faults.cache_full import _leave, _no_file_beyond, small_disk
from tests.faults.registry import Fault, pick, trials
from tests.training import tiny
from training.checkpoint.checkpointer import Checkpointer
from training.checkpoint.files import measured, read_index
from training.checkpoint.restore import newest_sound

_CASES = 20
_PAGE = 4096
_PROGRESS = {"rows": [{"step": 1}] * 200}


def state(step: int) -> dict[str, Any]:
    """Arrays of 400 KiB in all, other values at every step, and the step."""
    numbers = np.random.default_rng(step)
    sizes = {"a": 60_000, "b": 20_000, "c": 15_000, "d": 5_000, "e": 10}
    arrays = {name: numbers.standard_normal(size) for name, size in sizes.items()}
    return {name: jax.numpy.asarray(x, np.float32) for name, x in arrays.items()}


class Run:
    """Saves with a ledger, as a training step does."""

    def __init__(self, root: Path, attempt: str = "1-one") -> None:
        self.ledger = Ledger(str(root))
        directory = storage.join(str(root), "attempts", attempt, "checkpoints")
        self.checkpointer = Checkpointer(
            directory,
            tiny.Heard(
                commit=self._record,
                drop=lambda _, path: self.ledger.drop(_name(path), attempt),
            ),
            attempt=attempt,
            existing=self.recorded(),
        )

    def recorded(self) -> list[tuple[int, str]]:
        """Step and path of every checkpoint that exists for a later run."""
        shards = self.ledger.finished("checkpoint/").values()
        return sorted((s.result["step"], storage.join(self.ledger.root, s.root)) for s in shards)

    def _record(self, step: int, path: str) -> None:
        files = [File(*file, "") for file in measured(read_index(path))]
        self.ledger.add(_name(path), path, {"step": step}, files)

    def save(self, step: int) -> None:
        self.checkpointer.save(step, state(step), _PROGRESS)
        self.checkpointer.wait()


def _name(path: str) -> str:
    return f"checkpoint/{path.rpartition('/')[2]}"


def expect_newest(run: Run, step: int) -> None:
    """The newest recorded checkpoint is that of `step`, and has its values."""
    expected = state(step)
    found = newest_sound(run.recorded(), tiny.like(expected))
    assert found is not None, "no checkpoint is recorded"
    assert found[0] == step, f"resumed from step {found[0]} and not {step}"
    assert tiny.equal(found[2], expected)


def _refused(run: Run, said: str) -> None:
    try:
        run.save(2)
    except StorageError as error:
        if said not in str(error):
            raise
    else:
        raise AssertionError("a checkpoint was written to a full disk")
    assert len(run.recorded()) == 1, "a checkpoint counts that was not written"


def disk_full(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """One trial per amount of space left; see the module."""
    at_once = dataclasses.replace(local_storage._POLICY, first=0.0)
    figures: Counter[str] = Counter()
    with (
        mock.patch.object(local_storage, "_POLICY", at_once),
        small_disk(workspace / "disk") as mounted,
    ):
        needed = _pages_of_a_save(workspace / "probe")
        # Of a little less than is needed, what is missing are the last, small files.
        least = needed - _CASES // 2
        free = [least * i // (_CASES // 2) for i in range(_CASES // 2)]
        free += range(least, needed)
        assert len(free) == _CASES
        longest = 60_000 * 4

        def trial(number: int) -> None:
            case = pick(number, _CASES)
            store = workspace / ("disk/store" if mounted else str(number))
            shutil.rmtree(store, ignore_errors=True)
            run = Run(store)
            run.save(1)
            if mounted:
                taken = _leave(free[case] * _PAGE, workspace / "disk")
                try:
                    _refused(run, "No space left")
                    expect_newest(run, 1)
                finally:
                    taken.unlink()
                figures["on a full file system"] += 1
            else:
                with _no_file_beyond(longest * case // _CASES):
                    _refused(run, "File too large")
                expect_newest(run, 1)
                figures["by the size of a file, for no file system could be mounted"] += 1
            run.save(2)
            expect_newest(run, 2)
            again = Run(store, "2-two")
            again.save(3)
            expect_newest(again, 3)

        return {"trials": trials(seed, count, trial), **figures}


def _pages_of_a_save(root: Path) -> int:
    """Pages that the second save needs, with its record."""
    Run(root).save(1)
    files = [path.stat().st_size for path in root.rglob("*") if path.is_file()]
    shutil.rmtree(root)
    return sum(-(-size // os.sysconf("SC_PAGE_SIZE")) for size in files)


FAULTS = {20: [Fault("disk full while a checkpoint is saved", 5, 20, disk_full)]}
