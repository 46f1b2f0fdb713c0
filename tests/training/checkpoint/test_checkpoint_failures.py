"""Saves that fail: told of, tried again, and nothing of them is left."""

import os
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import models.named as hax
from pipeline.errors import InputError, StorageError, StoreUnavailable
from pipeline.store import storage
from tests.training import tiny
from training.checkpoint import checkpointer as checkpoint
from training.checkpoint import files


def test_one_failed_save_is_told_and_the_next_one_made(new_checkpointer):
    """A store that failed for a while costs its checkpoint and no other."""
    store = iter([OSError("no answer"), None, OSError("no answer"), None])
    failures = []

    def on_commit(step, path):
        if (error := next(store)) is not None:
            raise error

    checkpointer = new_checkpointer(
        commit=on_commit, event=lambda kind, step, reason: failures.append((step, reason))
    )
    for step in range(1, 5):
        checkpointer.save(step, tiny.small_state(), {})
        checkpointer._join()
    checkpointer.wait()
    assert [step for step, _ in failures] == [1, 3]
    assert checkpointer.committed[-1][0] == 4


def test_a_store_that_cannot_say_what_is_there_costs_that_save_alone(new_checkpointer, monkeypatch):
    """What it was asked about is not deleted."""
    ask, failures, answers = storage.exists, [], [True, False, True]

    def exists(url):
        if answers.pop(0):
            return ask(url)
        raise StoreUnavailable(f"{url}: 503")

    monkeypatch.setattr(storage, "exists", exists)
    deleted = []
    monkeypatch.setattr(checkpoint, "_discard", deleted.append)
    checkpointer = new_checkpointer(
        event=lambda kind, step, reason: failures.append((step, reason))
    )
    for step in (1, 2, 3):
        checkpointer.save(step, tiny.small_state(), {})
        checkpointer._join()
    checkpointer.wait()
    assert [step for step, _ in failures] == [2]
    assert "503" in failures[0][1]
    assert checkpointer.committed[-1][0] == 3
    assert deleted == []


def test_two_failed_saves_in_a_row_are_an_error_and_so_is_the_last(new_checkpointer):
    """Of a kind that says that trying again may help, with the reason."""

    def on_commit(step, path):
        raise OSError("no space left on device")

    checkpointer = new_checkpointer(commit=on_commit)
    checkpointer.save(1, tiny.small_state(), {})
    with pytest.raises(StoreUnavailable, match="no space left"):
        checkpointer.wait()
    checkpointer = new_checkpointer(commit=on_commit, attempt="b")
    checkpointer.save(1, tiny.small_state(), {})
    checkpointer.save(2, tiny.small_state(), {})
    with pytest.raises(StoreUnavailable, match="no space left"):
        checkpointer.save(3, tiny.small_state(), {})
    assert checkpointer.committed == []


def test_an_old_checkpoint_that_cannot_be_deleted_waits_for_the_next_time(new_checkpointer):
    """The new one is committed all the same."""
    refuse, dropped = [True], []

    def on_drop(step, path):
        if refuse and refuse.pop():
            raise OSError("no answer")
        dropped.append(step)

    checkpointer = new_checkpointer(drop=on_drop, dropped=lambda s: range(len(s) - 1))
    for step in (1, 2, 3):
        checkpointer.save(step, tiny.small_state(), {})
        checkpointer.wait()
        assert checkpointer.committed[-1][0] == step
    assert sorted(dropped) == [1, 2]


def test_a_checkpoint_whose_record_fails_is_forgotten_and_deleted(new_checkpointer, tmp_path):
    """In this order, for the record may have been made; and the save can be made again."""
    events = []

    def on_commit(step, path):
        events.append(("commit", step))
        if len(events) == 1:
            raise OSError("no space left on device")

    def on_drop(step, path):
        events.append(("drop", step, os.path.exists(path)))

    checkpointer = new_checkpointer(commit=on_commit, drop=on_drop)
    checkpointer.save(1, tiny.small_state(), {})
    with pytest.raises(StorageError, match="no space left"):
        checkpointer.wait()
    assert events == [("commit", 1), ("drop", 1, True)]
    assert os.listdir(tmp_path) == []
    checkpointer.save(1, tiny.small_state(), {})
    checkpointer.wait()
    assert events[2:] == [("commit", 1)]


def test_a_store_that_never_answers_is_an_error_in_time(new_checkpointer, monkeypatch):
    """The wait ends although the write does not."""
    gate = threading.Event()
    monkeypatch.setattr(files, "_write_local", lambda *_: gate.wait(60))
    monkeypatch.setattr(checkpoint, "_GRACE_SECONDS", 0.1)
    checkpointer = new_checkpointer(timeout_seconds=0.2)
    checkpointer.save(1, tiny.small_state(), {})
    with pytest.raises(StorageError, match="did not end in"):
        checkpointer.wait()
    gate.set()
    with pytest.raises(StorageError, match="not finished in"):
        checkpointer.wait()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_parameter_that_is_not_finite_is_never_committed(new_checkpointer, tmp_path, bad, dtype):
    """The array is named; a sum that overflows is no reason to refuse, nor is a plain array."""
    axes = hax.make_axes(embed=4)
    fine = {"w": hax.named(jnp.full(4, 3e38, dtype), axes), "losses": jnp.array([bad])}
    checkpointer = new_checkpointer()
    checkpointer.save(1, fine, {})
    checkpointer.wait()
    checkpointer.save(2, {"w": hax.named(jnp.array([1, bad, 1, 1.0], dtype), axes)}, {})
    with pytest.raises(InputError, match=r"w: expected finite values to save, found 1"):
        checkpointer.wait()
    assert os.listdir(tmp_path) == ["00000001.a"]
