"""Every kind of optimizer trains, is split over devices, and is saved and resumed to the bit."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests.training import tiny
from training.checkpoint.checkpointer import Checkpointer
from training.checkpoint.restore import restore
from training.checkpoint.tree_names import flatten
from training.step.program import build_program

RATES = {"muon": 1e-2, "lion": 3e-3}
KINDS = [("muon", "bfloat16"), ("lion", "float32")]


def optimizer(kind, dtype):
    """The tiny run's optimizer as another kind."""
    return dataclasses.replace(
        tiny.OPTIMIZER, kind=kind, moment_dtype=dtype, learning_rate=RATES[kind]
    )


@functools.cache
def program(kind, dtype, devices=1, **changes):
    """A tiny run's program with this optimizer."""
    config = dataclasses.replace(tiny.TRAIN, **changes)
    found = jax.devices()[:devices]
    return build_program(tiny.MODEL, optimizer(kind, dtype), config, found, eos_id=tiny.EOS)


def run(program, state, steps):
    """The state after training on the batches of these steps, and their losses."""
    losses = []
    for step in steps:
        tokens = tiny.random_tokens(step % 2)
        state, metrics = program.step(state, program.layout.place(tokens, tiny.BATCH))
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_loss_falls_and_a_restored_run_is_the_uninterrupted_one(kind, dtype, tmp_path):
    """Two batches are learned; from a checkpoint half-way the same bits come out."""
    tried = program(kind, dtype)
    middle, before = run(tried, tried.init(), range(3))
    checkpointer = Checkpointer(str(tmp_path), attempt="a")
    path = checkpointer.save(3, middle, {"rows": [], "evaluations": []})
    checkpointer.wait()
    kept = jax.tree.map(np.asarray, middle)
    restored = restore(path, tried.abstract)
    assert tiny.equal(restored, kept)
    end, after = run(tried, middle, range(3, 6))
    again, repeated = run(tried, restored, range(3, 6))
    assert tiny.equal(end, again)
    assert repeated == after
    assert int(end.skipped) == 0
    assert after[-1] < before[0] - 0.1


@pytest.mark.parametrize("kind", ["muon", "lion"])
def test_moments_are_split_as_their_parameters(kind):
    """Every moment has the sharding of the parameter it is of; the rest is on every device."""
    state = program(kind, "bfloat16", devices=4, parallel=tiny.split(2)).abstract
    parameters = flatten(state.model)
    moments = flatten(state.optimizer_state)
    seen = set()
    for name, moment in moments.items():
        of = next((p for p in parameters if name.endswith("." + p)), None)
        if of is None:
            assert moment.sharding.is_fully_replicated, name
            continue
        seen.add(of)
        assert moment.shape == parameters[of].shape
        assert moment.sharding == parameters[of].sharding
        assert moment.sharding.is_fully_replicated == ("norm" in of)
    assert seen == set(parameters)
