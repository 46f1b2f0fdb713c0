"""Damage is found before a value is used; the newest sound checkpoint wins; nothing is re-made."""

import dataclasses
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.errors import CorruptOutput, InputError
from tests.training import tiny
from training.checkpoint import chunks as checkpoint_chunks
from training.checkpoint import files
from training.checkpoint.checkpointer import Checkpointer
from training.checkpoint.files import measured, read_index, with_digest
from training.checkpoint.restore import load_model_onto, newest_sound, restore
from training.sharding.layout import make_layout
from training.step.program import build_program


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The program and two committed checkpoints, of steps 1 and 2."""
    program = tiny.program()
    checkpointer = Checkpointer(str(tmp_path_factory.mktemp("saved")), attempt="a")
    state, paths = program.init(), []
    for step in (1, 2):
        state = dataclasses.replace(state, step=jnp.asarray(step, jnp.int32))
        paths.append((step, checkpointer.save(step, state, {"rows": [], "evaluations": []})))
    checkpointer.wait()
    return program, paths, state


@pytest.fixture
def copies(saved, tmp_path):
    """Copies of the two checkpoints that a test may damage."""
    program, paths, _ = saved
    copied = []
    for step, path in paths:
        shutil.copytree(path, tmp_path / str(step))
        copied.append((step, str(tmp_path / str(step))))
    return program, copied


def _flip(path):
    data = bytearray(pathlib.Path(path).read_bytes())
    data[len(data) // 2] ^= 0x10
    pathlib.Path(path).write_bytes(data)


def _files(path):
    return sorted(os.path.join(d, n) for d, _, names in os.walk(path) for n in names)


@pytest.mark.slow
def test_another_bit_in_any_file_is_found(copies):
    """Restore raises and returns nothing; `tests.faults` has more kinds of damage."""
    program, paths = copies
    for file in _files(paths[1][1]):
        _flip(file)
        with pytest.raises(CorruptOutput):
            restore(paths[1][1], program.abstract)
        _flip(file)


@pytest.mark.slow
def test_damaged_newest_falls_back_and_is_reported(copies):
    """The next older one is restored, and the damage is reported with step and path."""
    program, paths = copies
    _flip(_files(paths[1][1])[3])
    heard = tiny.Heard()
    step, path, state, history = newest_sound(paths, program.abstract, heard)
    assert (step, path) == paths[0]
    assert int(state.step) == 1
    assert history == {"rows": [], "evaluations": []}
    ((kind, fields),) = heard.events
    assert (kind, fields["step"], fields["path"]) == ("corrupt_checkpoint", *paths[1])


def test_nothing_sound_is_an_error_and_nothing_at_all_is_not(copies):
    """Two damaged checkpoints stop the run; an empty list begins it."""
    program, paths = copies
    for _, path in paths:
        shutil.rmtree(os.path.join(path, "arrays"))
    with pytest.raises(CorruptOutput, match="none of 2 checkpoints is sound"):
        newest_sound(paths, program.abstract)
    assert newest_sound([], program.abstract) is None


def test_exchanged_checkpoints_are_found(copies):
    """A checkpoint of another step than its record says is damaged."""
    program, paths = copies
    (one, first), (two, second) = paths
    with pytest.raises(CorruptOutput, match="none of 2"):
        newest_sound([(one, second), (two, first)], program.abstract)


def test_an_edited_index_is_found(copies):
    """An index that is well-formed but not the one that was written is damage."""
    program, paths = copies
    index = pathlib.Path(paths[1][1], "index.json")
    index.write_text(index.read_text().replace('"step": 2', '"step": 3', 1))
    with pytest.raises(CorruptOutput, match="its own digest"):
        restore(paths[1][1], program.abstract)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": 3}, r"float32\[layers 2"),
        ({"vocab_size": 65}, r"model\.embedding.*vocab 65"),
        ({"tied": False}, r"model\.head.* is missing"),
        ({"qk_norm": False}, "is not part of this model"),
        ({"kv_heads": 4}, "kv_heads 4"),
    ],
)
def test_another_model_is_refused_by_name(saved, changes, words):
    """A sound checkpoint of another shape is an InputError naming the array, not a fallback."""
    _, paths, _ = saved
    config = dataclasses.replace(tiny.MODEL, **changes)
    program = build_program(config, tiny.OPTIMIZER, tiny.TRAIN, jax.devices()[:1], eos_id=0)
    with pytest.raises(InputError, match=words):
        newest_sound(paths, program.abstract)


def test_another_dtype_is_refused(saved):
    """Nothing is cast: a bfloat16 target does not take float32 arrays."""
    program, paths, _ = saved
    like = jax.tree.map(lambda x: x.update(dtype=jnp.bfloat16), program.abstract)
    with pytest.raises(InputError, match="needs bfloat16"):
        restore(paths[0][1], like)


@pytest.mark.parametrize("devices", [1, 2])
def test_load_model_gives_the_models_bits(saved, devices):
    """Only the model is read, with the bits that were saved, on one device or two."""
    _, paths, state = saved
    model = load_model_onto(make_layout(jax.devices()[:devices]), paths[1][1], tiny.MODEL)
    assert type(model) is type(state.model)
    assert tiny.equal(model, state.model)
    assert np.asarray(model.embedding.array).dtype == np.float32


def test_a_checkpoint_of_another_format_is_no_damage(copies):
    """It is not passed over for an older one: the message says what to do."""
    program, paths = copies
    index = pathlib.Path(paths[1][1], "index.json")
    index.write_bytes(with_digest({**read_index(paths[1][1]), "format": 1}))
    with pytest.raises(InputError, match="expected format 3, found 1"):
        newest_sound(paths, program.abstract)


def test_a_restored_state_may_be_donated(saved):
    """Arrays on eight devices made of the same bytes do not share memory."""
    _, paths, state = saved
    eight = tiny.program(8)
    restored = restore(paths[1][1], eight.abstract)
    step = jax.jit(
        lambda tree: jax.tree.map(lambda x: x * 0 + 7, tree),
        donate_argnums=0,
    )
    again = restore(paths[1][1], eight.abstract)
    for array in jax.tree.leaves(step(restored)):
        for shard in array.addressable_shards:
            assert (np.asarray(shard.data) == 7).all()
    assert tiny.equal(again, state)


@pytest.mark.parametrize("parallel", [None, tiny.split(4)])
def test_a_chunk_is_read_once_however_many_devices_hold_it(saved, monkeypatch, parallel):
    """On eight devices, copied or split in four; and only of the part that is asked for."""
    _, paths, state = saved
    monkeypatch.setattr(checkpoint_chunks, "_AHEAD_BYTES", 5000)
    read = []
    real = files._read_local
    monkeypatch.setattr(
        files,
        "_read_local",
        lambda path, targets: read.append(path) or real(path, targets),
    )
    changes = {} if parallel is None else {"parallel": parallel}
    like = tiny.program(8, **changes).abstract
    assert tiny.equal(restore(paths[1][1], like), state)
    every = {name for name, _, _ in measured(read_index(paths[1][1]))}
    assert sorted(read) == sorted(f"{paths[1][1]}/{name}" for name in every)
    read.clear()
    assert tiny.equal(restore(paths[1][1], like.model, prefix="model."), state.model)
    chunks = [name for name in read if "/c" in name.rpartition("arrays/")[2]]
    assert len(chunks) == len(set(chunks))
    assert all("/arrays/model." in name for name in chunks)
    assert len(chunks) >= len(jax.tree.leaves(state.model))
