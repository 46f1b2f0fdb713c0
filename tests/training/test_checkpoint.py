"""Saving: asynchronous, whole or absent, and never a silent failure."""

import hashlib
import json
import os
import threading

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from data import shard_files
from pipeline import google_storage
from pipeline.errors import DamagedOutput, InputError, StorageError, StoreUnavailable
from tests.faults.fake_gcs import FakeGCS, Faults
from tests.training import tiny
from training import checkpoint, checkpoint_copy, checkpoint_files
from training.checkpoint import Checkpointer
from training.checkpoint_index import measured, read_index
from training.restore import read_history, restore
from training.retention import Retention

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


def verify(path):
    """Compare every file with the digest that was taken while it was written; returns names."""
    names = []
    for name, size, sha256 in measured(read_index(path)):
        with open(os.path.join(path, name), "rb") as file:
            content = file.read()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (size, sha256), name
        names.append(name)
    return names


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
        verify(path)
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
    """What no rule keeps is dropped: first told, then deleted; earlier runs' ones count."""
    events = []
    old = make(attempt="old")
    old_paths = [old.save(step, {"x": jnp.zeros(3)}, {}) for step in (1, 2)]
    old.wait()

    def on_drop(step, path):
        events.append((step, path, os.path.exists(path)))

    checkpointer = make(
        retention=Retention(newest=2, every=4, milestones=(2,)),
        on_drop=on_drop,
        existing=[(1, old_paths[0]), (2, old_paths[1])],
    )
    paths = {step: checkpointer.save(step, {"x": jnp.zeros(3)}, {}) for step in range(3, 8)}
    checkpointer.wait()
    gone = [(1, old_paths[0]), (3, paths[3]), (5, paths[5])]
    assert events == [(*one, True) for one in gone]
    assert not any(os.path.exists(path) for _, path in gone)
    assert all(os.path.exists(path) for path in (old_paths[1], paths[4], paths[6], paths[7]))


def test_one_failed_save_is_told_and_the_next_one_made(make):
    """A store that failed for a while costs its checkpoint and no other."""
    store = iter([OSError("no answer"), None, OSError("no answer"), None])
    failures = []

    def on_commit(step, path):
        if (error := next(store)) is not None:
            raise error

    checkpointer = make(on_commit=on_commit, on_failure=lambda *found: failures.append(found))
    for step in range(1, 5):
        checkpointer.save(step, tiny.program().init(), {})
        checkpointer._join()
    checkpointer.wait()
    assert [step for step, _ in failures] == [1, 3]
    assert checkpointer.latest[0] == 4


def test_two_failed_saves_in_a_row_are_an_error_and_so_is_the_last(make):
    """Of a kind that says that trying again may help, with the reason."""

    def on_commit(step, path):
        raise OSError("no space left on device")

    checkpointer = make(on_commit=on_commit)
    checkpointer.save(1, tiny.program().init(), {})
    with pytest.raises(StoreUnavailable, match="no space left"):
        checkpointer.wait()
    checkpointer = make(on_commit=on_commit, attempt="b")
    checkpointer.save(1, tiny.program().init(), {})
    checkpointer.save(2, tiny.program().init(), {})
    with pytest.raises(StoreUnavailable, match="no space left"):
        checkpointer.save(3, tiny.program().init(), {})
    assert checkpointer.latest is None


def test_an_old_checkpoint_that_cannot_be_deleted_waits_for_the_next_time(make):
    """The new one is committed all the same."""
    refuse, dropped = [True], []

    def on_drop(step, path):
        if refuse and refuse.pop():
            raise OSError("no answer")
        dropped.append(step)

    checkpointer = make(on_drop=on_drop, retention=Retention(newest=1))
    for step in (1, 2, 3):
        checkpointer.save(step, tiny.program().init(), {})
        checkpointer.wait()
        assert checkpointer.latest[0] == step
    assert sorted(dropped) == [1, 2]


def test_a_checkpoint_whose_record_fails_is_forgotten_and_deleted(make, tmp_path):
    """In this order, for the record may have been made; and the save can be made again."""
    events = []

    def on_commit(step, path):
        events.append(("commit", step))
        if len(events) == 1:
            raise OSError("no space left on device")

    def on_drop(step, path):
        events.append(("drop", step, os.path.exists(path)))

    checkpointer = make(on_commit=on_commit, on_drop=on_drop)
    checkpointer.save(1, {"x": jnp.zeros(3)}, {})
    with pytest.raises(StorageError, match="no space left"):
        checkpointer.wait()
    assert events == [("commit", 1), ("drop", 1, True)]
    assert os.listdir(tmp_path) == []
    checkpointer.save(1, {"x": jnp.zeros(3)}, {})
    checkpointer.wait()
    assert events[2:] == [("commit", 1)]


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
    found = {
        os.path.relpath(os.path.join(folder, name), path)
        for folder, _, names in os.walk(path)
        for name in names
    }
    assert found == {*verify(path), "index.json"}
    with open(os.path.join(path, "history.json")) as file:
        assert json.load(file) == HISTORY


def test_arrays_are_ordinary_zarr(make):
    """TensorStore alone reads what was saved, whatever the shape and dtype."""
    arrays = {
        "a": np.arange(24, dtype=np.float32).reshape(4, 6),
        "b": np.asarray(jnp.arange(5, dtype=jnp.bfloat16)),
        "c": np.int32(-7),
        "d": np.array([True, False, True]),
        "e": np.zeros((0, 3), np.float32),
    }
    sharding = tiny.program(2).layout.replicated
    checkpointer = make()
    path = checkpointer.save(1, jax.device_put(arrays, sharding), {})
    checkpointer.wait()
    for name, want in arrays.items():
        store = {"driver": "file", "path": f"{path}/arrays/{name}/"}
        got = ts.open({"driver": "zarr3", "kvstore": store}).result().read().result()
        assert got.dtype == want.dtype
        assert np.array_equal(got, want)
    like = {
        name: jax.ShapeDtypeStruct(want.shape, want.dtype, sharding=sharding)
        for name, want in arrays.items()
    }
    assert tiny.equal(restore(path, like), arrays)


def test_a_save_copies_into_the_memory_that_was_reserved(make, monkeypatch):
    """It waits until every page is there; reserving again leaves what is being written alone."""
    touch, taken, gate = checkpoint_copy._touch, [], threading.Event()

    def slow(arrays):
        taken.append(arrays)
        assert gate.wait(60)
        touch(arrays)

    monkeypatch.setattr(checkpoint_copy, "_touch", slow)
    checkpointer, state = make(), {"x": jnp.arange(9999.0), "y": jnp.full(3, 7, jnp.bfloat16)}
    checkpointer.reserve(state)
    threading.Timer(0.2, gate.set).start()
    path = checkpointer.save(1, state, {})
    checkpointer.reserve(state)
    checkpointer.wait()
    (arrays,) = taken
    for array, values in zip(arrays, state.values(), strict=True):
        assert np.array_equal(array, values)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    assert tiny.equal(state, restore(path, like))


def test_save_does_not_wait_for_the_store(make, monkeypatch):
    """It returns while the first file is still being written, and `wait` waits."""
    gate, begun = threading.Event(), threading.Event()
    write = checkpoint_files._write_local

    def slow(*arguments):
        begun.set()
        assert gate.wait(60)
        write(*arguments)

    monkeypatch.setattr(checkpoint_files, "_write_local", slow)
    checkpointer = make()
    path = checkpointer.save(1, {"x": jnp.zeros(3)}, {})
    assert begun.wait(60)
    assert checkpointer.latest is None
    gate.set()
    checkpointer.wait()
    assert checkpointer.latest == (1, path)


def test_a_store_that_never_answers_is_an_error_in_time(make, monkeypatch):
    """The wait ends although the write does not."""
    gate = threading.Event()
    monkeypatch.setattr(checkpoint_files, "_write_local", lambda *_: gate.wait(60))
    monkeypatch.setattr(checkpoint, "_GRACE_SECONDS", 0.1)
    checkpointer = make(timeout_seconds=0.2)
    checkpointer.save(1, {"x": jnp.zeros(3)}, {})
    with pytest.raises(StorageError, match="did not end in"):
        checkpointer.wait()
    gate.set()
    with pytest.raises(StorageError, match="not finished in"):
        checkpointer.wait()


def test_a_failed_write_leaves_nothing(make, tmp_path, monkeypatch):
    """The unfinished files are deleted, and the same step can be saved again."""
    write = checkpoint_files._write_local
    calls = []

    def failing(url, parts):
        calls.append(url)
        write(url, parts)
        if "history" in url:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "_write_local", failing)
    monkeypatch.setattr(checkpoint_files, "_PAUSE_SECONDS", 0.0)
    checkpointer = make()
    path = checkpointer.save(1, {"x": jnp.zeros(3)}, {})
    with pytest.raises(StorageError, match="No space left"):
        checkpointer.wait()
    assert calls
    assert not os.listdir(tmp_path)
    monkeypatch.setattr(checkpoint_files, "_write_local", write)
    assert checkpointer.save(1, {"x": jnp.zeros(3)}, {}) == path
    checkpointer.wait()
    assert verify(path)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_parameter_that_is_not_finite_is_never_committed(make, tmp_path, bad):
    """The array is named; a sum that overflows is no reason to refuse, nor is a plain array."""
    axes = hax.make_axes(embed=4)
    fine = {"w": hax.named(jnp.full(4, 3e38), axes), "losses": jnp.array([bad])}
    checkpointer = make()
    checkpointer.save(1, fine, {})
    checkpointer.wait()
    checkpointer.save(2, {"w": hax.named(jnp.array([1, bad, 1, 1.0]), axes)}, {})
    with pytest.raises(InputError, match=r"w: expected finite values to save, found 1"):
        checkpointer.wait()
    assert os.listdir(tmp_path) == ["00000001.a"]


@pytest.mark.parametrize("failing", [0.0, 0.2])
def test_a_bucket_holds_what_a_disk_holds(make, tmp_path, monkeypatch, failing):
    """The same files, through requests that fail sometimes, and back onto other devices."""
    monkeypatch.setattr(google_storage, "FIRST_WAIT_SECONDS", 0.002)
    monkeypatch.setattr(google_storage, "LONGEST_WAIT_SECONDS", 0.01)
    quick = {"max_retries": 20, "initial_delay": "1ms", "max_delay": "4ms"}
    monkeypatch.setattr(shard_files, "GOOGLE_RETRIES", quick)
    state = tiny.program(4, parallel=tiny.split(4)).init()
    with FakeGCS() as server:
        server.faults = Faults(failing, kinds=("503", "429", "reset"), seed=1)
        commits = []
        remote = Checkpointer(
            "gs://bucket/run",
            attempt="a",
            on_commit=lambda *c: commits.append(c),
            retention=Retention(newest=1),
        )
        paths = [remote.save(step, state, HISTORY) for step in (1, 2)]
        remote.close()
        assert commits == [(1, paths[0]), (2, "gs://bucket/run/00000002.a")]
        like = tiny.program(2).abstract
        assert tiny.equal(restore(paths[1], like), state)
        assert read_history(paths[1]) == HISTORY
        server.faults = Faults()
        local = make()
        here = local.save(2, state, HISTORY)
        local.wait()
        prefix = "run/00000002.a/"
        names = set(server.buckets["bucket"])
        assert names == {prefix + name for name in [*verify(here), "index.json"]}
        for name in names:
            with open(os.path.join(here, name.removeprefix(prefix)), "rb") as file:
                assert file.read() == server.buckets["bucket"][name].data
        del server.buckets["bucket"][prefix + "arrays/step/c"]
        with pytest.raises(DamagedOutput, match=r"arrays/step/c: .*found no file"):
            restore(paths[1], like)


def test_a_store_that_is_neither_disk_nor_bucket_is_refused():
    """Before anything is copied."""
    with pytest.raises(InputError, match="local path or on gs://"):
        Checkpointer("memory://x", attempt="a").save(1, {"x": jnp.zeros(3)}, {})
