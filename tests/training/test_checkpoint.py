"""Saving: asynchronous, whole or absent, and never a silent failure."""

import json
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.errors import InputError, StorageError
from tests.training import tiny
from training.checkpoint import Checkpointer
from training.checkpoint_index import read_index, verify_files
from training.restore import read_history, restore

HISTORY = {"rows": [{"step": 1, "loss": 4.0}], "evaluations": []}


@pytest.fixture
def make(tmp_path):
    """Checkpointers of the test's directory, closed at its end."""
    made = []

    def make(**options):
        made.append(Checkpointer(str(tmp_path), **{"attempt": "a", **options}))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


@pytest.mark.parametrize(("devices", "group"), [(1, 1), (2, 2), (8, 4)])
def test_four_devices_restore_on_any_number(make, devices, group):
    """A state split over four devices comes back with the same bits on 1, 2 and 8."""
    state = tiny.program(4, parallel=tiny.split(4)).init()
    checkpointer = make()
    path = checkpointer.save(3, state, HISTORY)
    checkpointer.wait()
    like = tiny.program(devices, parallel=tiny.split(group)).abstract
    restored = restore(path, like)
    assert tiny.equal(state, restored)
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert got.sharding == want.sharding
    assert read_history(path) == HISTORY


def test_commit_comes_after_every_byte(make, tmp_path):
    """When the callback runs the files are all there, indexed and verified."""
    seen = []

    def on_commit(step, path):
        verify_files(path, read_index(path))
        seen.append((step, path, threading.current_thread() is threading.main_thread()))

    checkpointer = make(on_commit=on_commit)
    path = checkpointer.save(12, tiny.program().init(), HISTORY)
    checkpointer.wait()
    assert path == str(tmp_path / "00000012.a")
    assert seen == [(12, path, False)]
    assert checkpointer.latest == (12, path)


def test_arrays_may_be_donated_after_save(make):
    """Overwriting donated arrays right after save does not reach the checkpoint."""
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 7, tree), donate_argnums=0)
    checkpointer = make()
    for step in range(4):
        state = {f"x{i}": jnp.full((1024, 1024), step + i, jnp.float32) for i in range(4)}
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        path = checkpointer.save(step, state, {})
        for _ in range(3):
            state = overwrite(state)
        jax.block_until_ready(state)
        checkpointer.wait()
        for i in range(4):
            assert np.all(np.asarray(restore(path, like)[f"x{i}"]) == step + i)


def test_old_checkpoints_are_forgotten_then_deleted(make):
    """Beyond `keep`, the oldest is dropped: first told, then deleted; earlier runs' ones count."""
    events = []
    old = make(attempt="old")
    old_path = old.save(1, tiny.program().init(), {})
    old.wait()

    def on_drop(step, path):
        events.append((step, path, os.path.exists(path)))

    checkpointer = make(keep=2, on_drop=on_drop, existing=[(1, old_path)])
    paths = [checkpointer.save(step, tiny.program().init(), {}) for step in (2, 3)]
    checkpointer.wait()
    assert events == [(1, old_path, True)]
    assert not os.path.exists(old_path)
    assert all(os.path.exists(path) for path in paths)


def test_failed_commit_is_raised_by_the_next_save(make):
    """An error in the background is not lost: the next save raises it, once."""
    fail = [True]

    def on_commit(step, path):
        if fail.pop():
            raise OSError("no space left on device")

    checkpointer = make(on_commit=on_commit)
    checkpointer.save(1, tiny.program().init(), {})
    with pytest.raises(StorageError, match="no space left"):
        checkpointer.save(2, tiny.program().init(), {})
    assert checkpointer.latest is None
    fail.append(False)
    checkpointer.save(3, tiny.program().init(), {})
    checkpointer.wait()
    assert checkpointer.latest[0] == 3


def test_existing_path_is_refused(make, tmp_path):
    """A path where anything is already is refused, and nothing is committed."""
    commits = []
    checkpointer = make(on_commit=lambda step, path: commits.append(step))
    (tmp_path / "00000005.a").mkdir()
    with pytest.raises(InputError, match="exists already"):
        checkpointer.save(5, tiny.program().init(), {})
    (tmp_path / "00000006.a").write_text("a file where the directory should be")
    with pytest.raises(InputError, match="exists already"):
        checkpointer.save(6, tiny.program().init(), {})
    assert commits == []


def test_index_lists_every_file_with_its_digest(make):
    """The index accounts for each file under the checkpoint except itself."""
    checkpointer = make()
    path = checkpointer.save(2, tiny.program().init(), HISTORY)
    checkpointer.wait()
    listed = {entry["name"] for entry in read_index(path)["files"]}
    found = {
        os.path.relpath(os.path.join(folder, name), path)
        for folder, _, names in os.walk(path)
        for name in names
    }
    assert found == listed | {"index.json"}
    with open(os.path.join(path, "history.json")) as file:
        assert json.load(file) == HISTORY
