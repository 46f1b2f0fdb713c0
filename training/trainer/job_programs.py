"""The programs of a job, on devices that may not suit the phases behind it."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pipeline.errors import InputError
from training.config.job import TrainJob
from training.step.program import Programs, build_programs


def programs_of(job: TrainJob, devices: Sequence[jax.Device]) -> Programs:
    """The programs of the phases that may be left, or why the run cannot be (`InputError`).

    A run that moved may have older checkpoints in phases that its new devices cannot share. It
    needs these phases, which `Programs.refused` is about, only if all newer checkpoints are
    corrupt.
    """
    refused = None
    for done in dict.fromkeys((job.least_done, *(step for step, _ in job.resume_from))):
        try:
            programs = build_programs(
                job.model,
                job.optimizer,
                job.train,
                devices,
                eos_id=job.data.eos_id,
                padded=job.padded,
                masked=job.data.masked,
                begins=job.data.begins,
                done=done,
            )
        except InputError as error:
            refused = error
            continue
        return programs._replace(refused=refused)
    assert refused is not None
    raise refused
