"""A run that moves from one number of devices to another learns the same from the same batches."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.training import tiny
from training.trainer.trainer import train

STEPS = 12
MOVES = ((4, 1, 1), (8, 8, 1), (STEPS, 4, 2))  # until step, devices, microbatches


@pytest.mark.slow
def test_losses_stay_within_1e5_over_moves_between_devices(tmp_path):
    """1, 8, then 4 devices, with another split and microbatches, against one device."""
    tiny.write_data(str(tmp_path))
    config = dataclasses.replace(tiny.TRAIN, steps=STEPS, checkpoint_every=1, evaluate_every=10)
    job = tiny.make_job(str(tmp_path), train=config)
    whole = train(
        dataclasses.replace(job, checkpoint_directory=str(tmp_path / "whole")),
        devices=jax.devices()[:1],
    )
    committed, begin = [], 0
    for until, devices, microbatches in MOVES:
        moved = dataclasses.replace(
            config,
            microbatches=microbatches,
            parallel=tiny.split(min(2, devices)),
        )
        heard = tiny.Heard()
        result = train(
            dataclasses.replace(
                job, train=moved, resume_from=tuple(committed[-1:]), attempt=str(devices)
            ),
            heard,
            devices=jax.devices()[:devices],
        )
        committed = [record for record in heard.committed if record[0] <= until]
        assert committed[-1][0] == until
        steps = [row["step"] for row in tiny.rows(result)[begin:until]]
        assert steps == [*range(begin + 1, until + 1)]
        begin = until
    losses = [[row["loss"] for row in tiny.rows(run)] for run in (result, whole)]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-5)
    assert [r["tokens"] for r in tiny.rows(result)] == [r["tokens"] for r in tiny.rows(whole)]
