"""A run that moves from one number of devices to another learns the same from the same batches."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from pipeline import InputError
from tests.training import tiny

STEPS = 12
MOVES = ((4, 1, 1), (8, 8, 1), (STEPS, 4, 2))  # until step, devices, microbatches


@pytest.mark.slow
def test_losses_stay_within_1e5_over_moves_between_devices(data, tmp_path):
    """1, 8, then 4 devices, with another split and microbatches, against one device."""
    config = dataclasses.replace(tiny.TRAIN, steps=STEPS, checkpoint_every=1, evaluate_every=10)
    job = tiny.make_job(data, train=config, checkpoint_directory=str(tmp_path / "moved"))
    whole = tiny.run(job, checkpoint_directory=str(tmp_path / "whole"))
    committed, begin = [], 0
    for until, devices, microbatches in MOVES:
        moved = dataclasses.replace(
            config,
            microbatches=microbatches,
            parallel=tiny.split(min(2, devices)),
        )
        heard = tiny.Heard()
        newest = {"resume_from": tuple(committed[-1:]), "attempt": str(devices)}
        result = tiny.run(job, heard, devices, train=moved, **newest)
        committed = [record for record in heard.committed if record[0] <= until]
        assert committed[-1][0] == until
        steps = [row["step"] for row in tiny.rows(result)[begin:until]]
        assert steps == [*range(begin + 1, until + 1)]
        begin = until
    losses = [[row["loss"] for row in tiny.rows(run)] for run in (result, whole)]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-5)
    assert [r["tokens"] for r in tiny.rows(result)] == [r["tokens"] for r in tiny.rows(whole)]


@pytest.mark.slow
def test_phases_that_are_done_need_not_divide_over_other_devices(data, tmp_path):
    """Batches of 2 before step 3, then of 4 on four devices; an older checkpoint needs them."""
    train = {"steps": 4, "batch_size": 2, "batch_schedule": ((3, 4),), "evaluate_every": 4}
    job = tiny.make_job(data, train=train, checkpoint_directory=str(tmp_path))
    heard = tiny.Heard()
    whole = tiny.run(job, heard)
    saved = tuple(heard.committed[:3])
    moved = tiny.run(job, None, 4, resume_from=saved, attempt="moved")
    losses = [[row["loss"] for row in tiny.rows(each)] for each in (moved, whole)]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-5)
    for path in Path(saved[-1][1]).rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(InputError, match="a batch of 2 from step 0 on is not divisible by 4"):
        tiny.run(job, None, 4, resume_from=saved, attempt="corrupt")
