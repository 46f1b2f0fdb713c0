"""A run with every field of groups, Muon's variants, decay and averages: resumed, and split."""

import dataclasses
import os
import signal

import jax
import numpy as np
import pytest

from pipeline.errors import InputError
from tests.training import tiny
from tests.training.optimizer.test_recipes import NANOCHAT
from training.checkpoint.checkpointer import Checkpointer
from training.checkpoint.restore import load_model, restore
from training.checkpoint.tree_names import flatten
from training.config import Group
from training.step.program import build_program

MODEL = dataclasses.replace(tiny.MODEL, tied=False)
RECIPE = dataclasses.replace(
    NANOCHAT, clip_norm=1.0, decay_shape="sqrt", decay=3.0, matrices=Group(beta1=0.5)
)
LAST = dataclasses.replace(tiny.TRAIN, steps=8, average_last=0.5, checkpoint_every=1000)


def recipe_program(devices=1, optimizer=RECIPE, **changes):
    """The program of a tiny run with the recipe."""
    config = dataclasses.replace(LAST, **changes)
    return build_program(MODEL, optimizer, config, jax.devices()[:devices], eos_id=tiny.EOS)


@pytest.mark.slow
def test_a_run_that_was_ended_is_resumed_to_the_bit(data, tmp_path, sigterm):
    """Ended by SIGTERM after step 5 of 8, in the tail, while momentum, decay and rate change and
    the last parameters are averaged: rows, evaluations, mean and state are the uninterrupted's."""
    job = tiny.make_job(data, model=MODEL, optimizer=RECIPE, train=LAST)

    def run(name, heard=None, **changes):
        return tiny.run(job, heard, checkpoint_directory=str(tmp_path / name), **changes)

    def leave(step, steps, row):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    want, heard = run("whole"), tiny.Heard(progress=leave)
    assert run("ended", heard).preempted
    ((step, _),) = heard.committed
    assert 5 <= step < 8
    got = run("ended", resume_from=tuple(heard.committed), attempt="1")
    assert tiny.learned(tiny.rows(got)) == tiny.learned(tiny.rows(want))
    assert tiny.rows(got, "evaluations") == tiny.rows(want, "evaluations")
    abstract = recipe_program().abstract
    mine, whole = (restore(each.checkpoint, abstract) for each in (got, want))
    assert tiny.equal(mine, whole)
    assert int(whole.averaged) == 4
    assert tiny.equal(load_model(got.checkpoint, MODEL), whole.ema)
    assert not tiny.equal(whole.model, whole.ema)


@pytest.mark.slow
def test_eight_devices_train_as_one():
    """Six losses and the mean of the parameters; rows' squares are whole, as norms are."""
    found = []
    for devices, changes in ((1, {}), (8, {"parallel": tiny.split(4)})):
        program = recipe_program(devices, steps=6, **changes)
        state, losses = program.init(), []
        for step in range(6):
            tokens = program.layout.place(tiny.random_tokens(step % 2), tiny.BATCH)
            state, metrics = program.step(state, tokens)
            losses.append(float(metrics["loss"]))
        found.append((losses, state))
    (losses, one), (split, many) = found
    np.testing.assert_allclose(split, losses, rtol=2e-3)
    assert losses[-1] < losses[0] - 0.1
    for a, b in zip(*(jax.tree.leaves(state.ema) for state in (one, many)), strict=True):
        assert np.linalg.norm(np.asarray(a) - b) < 0.02 * np.linalg.norm(a)
    rows = {n: x for n, x in flatten(many.optimizer_state).items() if ".2.blocks" in n}
    assert len(rows) == 7
    # The longer side of the MLP's matrices is "mlp"; of the others, "embed" or heads.
    assert {n.split(".")[-2] for n, x in rows.items() if x.shape[1:] == (64,)} == {
        *("gate", "up", "down")
    }
    assert all(x.sharding.is_fully_replicated for x in rows.values())


@pytest.mark.slow
def test_a_checkpoint_of_other_groups_or_averages_is_refused(tmp_path):
    """The message names an array of the checkpoint and the fields that may differ."""
    checkpointer = Checkpointer(str(tmp_path), attempt="a")
    path = checkpointer.save(0, recipe_program().init(), {})
    checkpointer.wait()
    for program in (
        recipe_program(average_last=0.0),
        recipe_program(optimizer=dataclasses.replace(RECIPE, kind="lion")),
        recipe_program(optimizer=dataclasses.replace(RECIPE, moment_dtype="bfloat16")),
        recipe_program(optimizer=dataclasses.replace(RECIPE, head=Group())),
        recipe_program(optimizer=dataclasses.replace(RECIPE, muon_row_beta=None)),
        recipe_program(
            optimizer=dataclasses.replace(
                RECIPE, muon_momentum_start=None, muon_momentum_warmup=0, muon_momentum_end=None
            )
        ),
    ):
        with pytest.raises(InputError, match=r"array '.*OptimizerConfig \(kind, groups.*average"):
            restore(path, program.abstract)
