"""The state a run begins with: its own newest checkpoint, another run's, or new parameters.

Which of the three is never guessed: a run with checkpoints of its own resumes from them or fails;
one that was given a `Start` takes exactly what that says; only one with neither makes parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from pipeline.errors import InputError
from training.checkpoint.restore import newest_sound, read_history, restore
from training.config.job import MetricsRow, Start, TrainJob
from training.step.program import Program
from training.step.state import TrainState
from training.trainer.data_offset import check_data_offset, data_offset

OnDamage = Callable[[int, str, str], None]


@dataclass(frozen=True)
class InitialState:
    """Where a run begins.

    Attributes:
        state: its arrays.
        step: steps done before.
        rows: one per step before.
        evaluations: rows before.
        samples: rows before.
        existing: (step, path) of sound checkpoints of this run, oldest first.
        passed_over: (step, path) of newer ones that are damaged.
        event: what to tell, (kind, fields); None for new parameters.
    """

    state: TrainState
    step: int = 0
    rows: list[MetricsRow] = field(default_factory=list)
    evaluations: list[MetricsRow] = field(default_factory=list)
    samples: list[MetricsRow] = field(default_factory=list)
    existing: Sequence[tuple[int, str]] = ()
    passed_over: Sequence[tuple[int, str]] = ()
    event: tuple[str, dict[str, Any]] | None = None


def restore_or_init(job: TrainJob, program: Program, on_damage: OnDamage) -> InitialState:
    """Resume, start from another run's checkpoint, or make new parameters.

    Raises:
        CorruptOutput: there are checkpoints to resume from and none is sound, or the one to start
            from is damaged.
        InputError: a checkpoint is of another model, at another place in the data, or has more
            steps than this run.
    """
    found = newest_sound(job.resume_from, program.abstract, on_damage)
    if found is not None:
        step, path, state, history = found
        check_data_offset(history["position"], data_offset(job.data, job.train, step), path)
        known = job.resume_from.index((step, path)) + 1
        return InitialState(
            state,
            step,
            **_rows(history),
            existing=job.resume_from[:known],
            passed_over=job.resume_from[known:],
            event=("resumed", {"step": step, "path": path}),
        )
    if job.start is not None:
        return _from(job.start, job, program)
    return InitialState(program.init())


def _rows(history: dict[str, Any]) -> dict[str, Any]:
    return {name: history[name] for name in ("rows", "evaluations", "samples")}


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
        history = read_history(start.checkpoint)
        here = data_offset(job.data, job.train, step)
        check_data_offset(history["position"], here, start.checkpoint)
        return InitialState(state, step, **_rows(history), event=event)
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
