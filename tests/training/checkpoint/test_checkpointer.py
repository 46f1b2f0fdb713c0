"""Saving: asynchronous, whole or absent, and never a silent failure."""

import errno
import functools
import hashlib
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from data.cache import shard_io
from pipeline.errors import CorruptOutput, InputError, StorageError
from pipeline.store import object_storage, storage
from tests.faults.fake_gcs import FakeGCS, Faults
from tests.training import tiny
from training.checkpoint import device_to_host, files
from training.checkpoint.checkpointer import Checkpointer
from training.checkpoint.files import measured, read_index
from training.checkpoint.restore import read_progress, restore
from training.config import TrainConfig
from training.config.batch_schedule import dropped

PROGRESS = {"evaluated": 0, "skipped": [0.0, 0]}


def verify(path):
    """Compare every file with the digest that was taken while it was written; returns names."""
    names = []
    for name, size, sha256 in measured(read_index(path)):
        with open(os.path.join(path, name), "rb") as file:
            content = file.read()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (size, sha256), name
        names.append(name)
    return names


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "group"), [(1, 1), (2, 2), (8, 4)])
def test_four_devices_restore_on_any_number(new_checkpointer, devices, group):
    """A state split over four devices comes back with the same bits on 1, 2 and 8."""
    state = tiny.program(4, parallel=tiny.split(4)).init()
    checkpointer = new_checkpointer()
    path = checkpointer.save(3, state, PROGRESS)
    checkpointer.wait()
    like = tiny.program(devices, parallel=tiny.split(group)).abstract
    restored = restore(path, like)
    assert tiny.equal(state, restored)
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
        assert got.sharding == want.sharding
    assert read_progress(path) == PROGRESS


def test_commit_comes_after_every_byte(new_checkpointer, tmp_path):
    """When the callback runs the files are all there, indexed and verified."""
    seen = []

    def on_commit(step, path):
        verify(path)
        seen.append((step, path, threading.current_thread() is threading.main_thread()))

    checkpointer = new_checkpointer(commit=on_commit)
    path = checkpointer.save(12, tiny.small_state(), PROGRESS)
    checkpointer.wait()
    assert path == str(tmp_path / "00000012.a")
    assert seen == [(12, path, False)]
    assert checkpointer.committed[-1] == (12, path)


@pytest.mark.slow
def test_arrays_may_be_donated_after_save(new_checkpointer):
    """Overwriting donated arrays right after save does not reach the checkpoint."""
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 7, tree), donate_argnums=0)
    checkpointer = new_checkpointer()
    for step in range(4):
        state = {f"x{i}": jnp.full((1024, 1024), step + i, jnp.float32) for i in range(4)}
        like = tiny.like(state)
        path = checkpointer.save(step, state, {})
        for _ in range(3):
            state = overwrite(state)
        jax.block_until_ready(state)
        checkpointer.wait()
        for i in range(4):
            assert np.all(np.asarray(restore(path, like)[f"x{i}"]) == step + i)


def test_old_checkpoints_are_forgotten_then_deleted(new_checkpointer):
    """What no rule keeps is dropped: first told, then deleted; earlier runs' ones count."""
    events = []
    old = new_checkpointer(attempt="old")
    old_paths = [old.save(step, tiny.small_state(), {}) for step in (1, 2)]
    old.wait()

    def on_drop(step, path):
        events.append((step, path, os.path.exists(path)))

    train = TrainConfig(batch_size=1, keep_checkpoints=2, keep_every=4, milestones=(2,))
    checkpointer = new_checkpointer(
        dropped=functools.partial(dropped, train=train),
        drop=on_drop,
        existing=[(1, old_paths[0]), (2, old_paths[1])],
    )
    paths = {step: checkpointer.save(step, tiny.small_state(), {}) for step in range(3, 8)}
    checkpointer.wait()
    gone = [(1, old_paths[0]), (3, paths[3]), (5, paths[5])]
    assert events == [(*one, True) for one in gone]
    assert not any(os.path.exists(path) for _, path in gone)
    assert all(os.path.exists(path) for path in (old_paths[1], paths[4], paths[6], paths[7]))


def test_what_cannot_be_deleted_is_dropped_and_deleted_later(new_checkpointer, monkeypatch):
    """A dropped checkpoint has no record, so it is no result; its files go with a later save."""
    records, delete = {}, storage.delete_tree
    checkpointer = new_checkpointer(
        dropped=lambda steps: range(len(steps) - 1),
        commit=records.__setitem__,
        drop=lambda step, path: records.pop(step),
    )

    def busy(path):
        raise OSError(errno.EBUSY, "Device or resource busy", path)

    monkeypatch.setattr(storage, "delete_tree", busy)
    paths = []
    for step in (1, 2, 3):
        if step == 3:
            checkpointer.wait()
            assert dict(checkpointer.committed) == records == {2: paths[1]}
            assert os.path.exists(paths[0])
            monkeypatch.setattr(storage, "delete_tree", delete)
        paths.append(checkpointer.save(step, tiny.small_state(), {}))
    checkpointer.wait()
    assert dict(checkpointer.committed) == records == {3: paths[2]}
    assert [os.path.exists(path) for path in paths] == [False, False, True]


def test_existing_path_is_refused(new_checkpointer, tmp_path):
    """A path where anything is already is refused, and nothing is committed."""
    commits = []
    checkpointer = new_checkpointer(commit=lambda step, path: commits.append(step))
    (tmp_path / "00000005.a").mkdir()
    (tmp_path / "00000006.a").write_text("a file where the directory should be")
    for step in (5, 6):
        checkpointer.save(step, tiny.small_state(), {})
        with pytest.raises(InputError, match="exists already"):
            checkpointer.wait()
    assert commits == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000005.a", "00000006.a"]


def test_arrays_are_ordinary_zarr(new_checkpointer):
    """TensorStore alone reads what was saved, whatever the shape and dtype."""
    arrays = {
        "a": np.arange(24, dtype=np.float32).reshape(4, 6),
        "b": np.asarray(jnp.arange(5, dtype=jnp.bfloat16)),
        "c": np.int32(-7),
        "d": np.array([True, False, True]),
        "e": np.zeros((0, 3), np.float32),
    }
    placed = jax.device_put(arrays, tiny.program(2).layout.replicated)
    checkpointer = new_checkpointer()
    path = checkpointer.save(1, placed, {})
    checkpointer.wait()
    for name, want in arrays.items():
        store = {"driver": "file", "path": f"{path}/arrays/{name}/"}
        got = ts.open({"driver": "zarr3", "kvstore": store}).result().read().result()
        assert got.dtype == want.dtype
        assert np.array_equal(got, want)
    assert tiny.equal(restore(path, tiny.like(placed)), arrays)


def test_save_does_not_wait_for_the_store(new_checkpointer, monkeypatch):
    """It returns while the first file is still being written, and `wait` waits."""
    gate, begun = threading.Event(), threading.Event()
    write = files._write_local

    def slow(*arguments):
        begun.set()
        assert gate.wait(60)
        write(*arguments)

    monkeypatch.setattr(files, "_write_local", slow)
    checkpointer = new_checkpointer()
    path = checkpointer.save(1, tiny.small_state(), {})
    assert begun.wait(60)
    assert checkpointer.committed == []
    gate.set()
    checkpointer.wait()
    assert checkpointer.committed[-1] == (1, path)


def test_a_failed_write_leaves_nothing(new_checkpointer, tmp_path, monkeypatch):
    """The unfinished files are deleted, and the same step can be saved again."""
    write = files._write_local
    calls = []

    def failing(url, parts):
        calls.append(url)
        write(url, parts)
        if "progress" in url:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write_local", failing)
    checkpointer = new_checkpointer()
    path = checkpointer.save(1, tiny.small_state(), {})
    with pytest.raises(StorageError, match="No space left"):
        checkpointer.wait()
    assert calls
    assert not os.listdir(tmp_path)
    monkeypatch.setattr(files, "_write_local", write)
    assert checkpointer.save(1, tiny.small_state(), {}) == path
    checkpointer.wait()
    assert verify(path)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0.0, 0.2])
def test_a_bucket_holds_what_a_disk_holds(new_checkpointer, tmp_path, monkeypatch, failing):
    """The same files, through requests that fail sometimes, and back onto other devices."""
    monkeypatch.setattr(object_storage, "FIRST_WAIT_SECONDS", 0.002)
    monkeypatch.setattr(object_storage, "LONGEST_WAIT_SECONDS", 0.01)
    quick = {"max_retries": 20, "initial_delay": "1ms", "max_delay": "4ms"}
    monkeypatch.setattr(shard_io, "BUCKET_RETRIES", quick)
    state = tiny.program(4, parallel=tiny.split(4)).init()
    with FakeGCS() as server:
        server.faults = Faults(failing, kinds=("503", "429", "reset"), seed=1)
        heard = tiny.Heard()
        remote = Checkpointer(
            "gs://bucket/run",
            heard,
            attempt="a",
            dropped=lambda steps: range(len(steps) - 1),
        )
        paths = [remote.save(step, state, PROGRESS) for step in (1, 2)]
        remote.wait()
        assert heard.committed == [(1, paths[0]), (2, "gs://bucket/run/00000002.a")]
        like = tiny.program(2).abstract
        assert tiny.equal(restore(paths[1], like), state)
        assert read_progress(paths[1]) == PROGRESS
        server.faults = Faults()
        local = new_checkpointer()
        here = local.save(2, state, PROGRESS)
        local.wait()
        prefix = "run/00000002.a/"
        names = set(server.buckets["bucket"])
        assert names == {prefix + name for name in [*verify(here), "index.json"]}
        for name in names:
            with open(os.path.join(here, name.removeprefix(prefix)), "rb") as file:
                assert file.read() == server.buckets["bucket"][name].data
        del server.buckets["bucket"][prefix + "arrays/step/c"]
        with pytest.raises(CorruptOutput, match=r"arrays/step/c: .*found no file"):
            restore(paths[1], like)


def test_a_store_that_is_neither_disk_nor_bucket_is_refused():
    """Before anything is copied."""
    with pytest.raises(InputError, match="use a local path, gs:// or s3://"):
        Checkpointer("memory://x", attempt="a").save(1, tiny.small_state(), {})


def test_a_save_copies_into_the_memory_that_was_reserved(new_checkpointer, monkeypatch):
    """It waits until every page is there; reserving again leaves what is being written alone."""
    touch, taken, gate = device_to_host._touch, [], threading.Event()

    def slow(arrays):
        taken.append(arrays)
        assert gate.wait(60)
        touch(arrays)

    monkeypatch.setattr(device_to_host, "_touch", slow)
    checkpointer, state = (
        new_checkpointer(),
        {"x": jnp.arange(9999.0), "y": jnp.full(3, 7, jnp.bfloat16)},
    )
    checkpointer.reserve(state)
    threading.Timer(0.2, gate.set).start()
    path = checkpointer.save(1, state, {})
    checkpointer.reserve(state)
    checkpointer.wait()
    (arrays,) = taken
    for array, values in zip(arrays, state.values(), strict=True):
        assert np.array_equal(array, values)
    assert tiny.equal(state, restore(path, tiny.like(state)))
