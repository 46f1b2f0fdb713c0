"""The state a run begins with: its own newest checkpoint, another run's, or new parameters.

Which of the three is never guessed: a run with checkpoints of its own resumes from them or fails;
one that was given a `Start` takes exactly what that says; only one with neither makes parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from pipeline.errors import InputError
from training.checkpoint.restore import newest_sound, read_progress, restore
from training.config.job import Start, TrainJob
from training.metrics.history import Segment, check_history, from_relative
from training.step.program import Program
from training.step.state import TrainState
from training.trainer.data_offset import check_data_offset, data_offset
from training.trainer.run_context import RunContext


@dataclass(frozen=True)
class InitialState:
    """Where a run begins.

    Attributes:
        state: its arrays.
        step: steps done before.
        history: of the steps before; of another run where `copied`.
        copied: whether this run takes over that history instead of continuing it.
        evaluated: step of the last evaluation, -1 before the first.
        skipped: see `training.metrics.recorder.Recorder`.
        existing: (step, path) of sound checkpoints of this run, oldest first.
        passed_over: (step, path) of newer ones that are damaged.
        event: what to tell, (kind, fields); None for new parameters.
    """

    state: TrainState
    step: int = 0
    history: Sequence[Segment] = ()
    copied: bool = False
    evaluated: int = -1
    skipped: tuple[float, int] = (0.0, 0)
    existing: Sequence[tuple[int, str]] = ()
    passed_over: Sequence[tuple[int, str]] = ()
    event: tuple[str, dict[str, Any]] | None = None


def restore_or_init(job: TrainJob, program: Program, run: RunContext) -> InitialState:
    """Resume, start from another run's checkpoint, or make new parameters.

    Raises:
        CorruptOutput: there are checkpoints to resume from and none is sound, or the one to start
            from is damaged.
        InputError: a checkpoint is of another model, at another place in the data, or has more
            steps than this run.
    """

    def on_damage(step: int, path: str, reason: str) -> None:
        run.event("damaged_checkpoint", step=step, path=path, reason=reason)

    found = newest_sound(job.resume_from, program.abstract, on_damage, _read_progress)
    if found is not None:
        step, path, state, progress = found
        check_data_offset(progress["data_offset"], data_offset(job.data, job.train, step), path)
        known = job.resume_from.index((step, path)) + 1
        return InitialState(
            state,
            step,
            **_continued(progress),
            existing=job.resume_from[:known],
            passed_over=job.resume_from[known:],
            event=("resumed", {"step": step, "path": path}),
        )
    if job.start is not None:
        return _from(job.start, job, program)
    return InitialState(program.init())


def _read_progress(path: str) -> dict[str, Any]:
    """With the URLs of its history, all of which is there."""
    progress = read_progress(path)
    history = from_relative(progress["history"], path)
    check_history(history)
    return {**progress, "history": history}


def _continued(progress: dict[str, Any]) -> dict[str, Any]:
    skipped, in_a_row = progress["skipped"]
    names = ("history", "evaluated")
    return {**{name: progress[name] for name in names}, "skipped": (skipped, in_a_row)}


def _from(start: Start, job: TrainJob, program: Program) -> InitialState:
    event = ("started_from", {"path": start.checkpoint, "take": start.take})
    if start.take == "everything":
        state = restore(start.checkpoint, program.abstract)
        step, steps = int(state.step), job.train.steps
        if step >= steps:
            raise InputError(
                f"{start.checkpoint} has done {step} steps and TrainConfig.steps is {steps}; to go "
                "on from it ask for more steps, or choose an earlier checkpoint"
            )
        progress = _read_progress(start.checkpoint)
        here = data_offset(job.data, job.train, step)
        check_data_offset(progress["data_offset"], here, start.checkpoint)
        return InitialState(state, step, **_continued(progress), copied=True, event=event)
    state = program.init()
    model = restore(start.checkpoint, program.abstract.model, part="model.")
    state = eqx.tree_at(lambda s: s.model, state, model)
    if state.average is not None:
        average = jax.tree.map(jnp.copy, model)
        state = eqx.tree_at(lambda s: s.average, state, average)
    if start.take == "moments":
        like = program.abstract.optimizer_state
        moments = restore(start.checkpoint, like, part="optimizer_state.")
        state = eqx.tree_at(lambda s: s.optimizer_state, state, moments)
    return InitialState(state, event=event)
