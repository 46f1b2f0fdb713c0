"""Fault 20, token cache: the disk is full at some byte of a shard.

A shard is written, through the ledger, to a file system of a few MiB of which all but some bytes
are taken, so that another write fails each time: the data file's, or one of the small ones'. On a
machine where no file system can be mounted, this process may write no file beyond some size.
Either way the writer raises `StorageError`, the ledger counts nothing, and the same
task with space again gives the files that an undisturbed writer makes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data.cache import token_shard as cache
from data.cache.token_array import TokenArray
from data.cache.token_shard import TokenShard
from pipeline.errors import StorageError
from pipeline.graph.step_context import ShardTask, write_shard
from pipeline.store import storage
from pipeline.store.ledger import Ledger
from tests.faults.registry import Fault, pick, trials

_SIZE = 4 << 20
_PAGE = 4096
_TOKENS = 300_000
_CASES = 20
_NAME = "train/0"


def documents() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`_TOKENS` tokens in documents of 999 ids, in batches."""
    numbers = np.random.default_rng(0)
    for _ in range(10):
        lengths = np.full(_TOKENS // 10_000, 999)
        yield numbers.integers(1, 500, lengths.sum()).astype(np.uint32), lengths


def write(directory: str, item: None) -> dict[str, Any]:
    """Shard writer: the documents, in `cache` as the tokenizing step has it."""
    del item
    counts = cache.write_shard(
        storage.join(directory, "cache"), documents(), vocab_size=500, eos_id=0
    )
    return {"tokens": counts.tokens, "check": counts.check}


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory by its path inside."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@contextlib.contextmanager
def small_disk(at: Path) -> Iterator[bool]:
    """A file system of `_SIZE` bytes at `at`; False where this process may not mount one."""
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(at)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(at)], check=True)


def _leave(free: int, at: Path) -> Path:
    """Take all space but `free` bytes; returns the file that takes it."""
    taken = at / "taken"
    state = os.statvfs(at)
    with open(taken, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_frsize - free)
    return taken


@contextlib.contextmanager
def _no_file_beyond(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _refused(task: ShardTask, said: str) -> None:
    try:
        write_shard(task)
    except StorageError as error:
        if said not in str(error):
            raise
    else:
        raise AssertionError("a shard was written to a full disk")
    assert task.ledger.finished() == {}, "the ledger counts a shard that was not written"


def _retried(task: ShardTask, expected: dict[str, bytes]) -> None:
    shard = write_shard(task)
    directory = storage.join(task.ledger.root, shard.root)
    assert contents(Path(directory)) == expected, "the retry wrote other bytes"
    tokens = TokenShard(directory + "/cache", shard.result["tokens"], shard.result["check"])
    found = TokenArray([tokens], 500).read(np.array([0]), _TOKENS)[0]
    parts = [np.insert(ids.reshape(-1, 999), 999, 0, axis=1).ravel() for ids, _ in documents()]
    assert np.array_equal(found, np.concatenate(parts)), "the retry wrote other tokens"


def disk_full(seed: int, count: int, workspace: Path) -> dict[str, Any]:
    """One trial per amount of space left; see the module."""
    write(str(workspace / "sound"), None)
    expected = contents(workspace / "sound")
    figures: Counter[str] = Counter()

    with small_disk(workspace / "disk") as mounted:
        # From nothing to a little less than the files take; the last pages are of small files.
        pages = sum(-(-len(content) // _PAGE) for content in expected.values()) + 1
        steps = [0, 1, 2, *range(pages - 12, pages - 1), *range(9, pages - 12, pages // 6)]

        def on_a_small_disk(number: int) -> None:
            store = workspace / "disk/store"
            shutil.rmtree(store, ignore_errors=True)
            task = ShardTask(Ledger(str(store)), "attempt", _NAME, write, None)
            store.mkdir()
            taken = _leave(steps[pick(number, _CASES)] * _PAGE, workspace / "disk")
            try:
                _refused(task, "No space left")
            finally:
                taken.unlink()
            _retried(task, expected)
            figures["on a full file system"] += 1

        longest = max(map(len, expected.values()))
        sizes = [longest * step // _CASES for step in range(_CASES - 1)] + [longest - 1]

        def with_short_files(number: int) -> None:
            store = workspace / str(number)
            task = ShardTask(Ledger(str(store)), "attempt", _NAME, write, None)
            with _no_file_beyond(sizes[pick(number, _CASES)]):
                _refused(task, "File too large")
            _retried(task, expected)
            shutil.rmtree(store)
            figures["by the size of a file, for no file system could be mounted"] += 1

        trial: Callable[[int], None] = on_a_small_disk if mounted else with_short_files
        assert len(steps) >= _CASES
        return {"trials": trials(seed, count, trial), **figures}


FAULTS = {20: [Fault("disk full while a token shard is written", 5, 20, disk_full)]}
