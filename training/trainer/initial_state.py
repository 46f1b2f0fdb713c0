"""The state a run begins with: its own newest checkpoint, another run's, or new parameters.

The choice is explicit: a run with checkpoints of its own resumes from them or fails; a run with a
`Start` takes exactly the parts that it names; only a run with neither initializes new parameters.

A batch is a pure function of the data's order and the step, so a checkpoint needs no iterator
state: it stores a digest of the order and the number of sequences read, and a resume compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from data.batches.dataset import DatasetSpec
from pipeline.errors import InputError
from pipeline.identity.fingerprint import digest
from training.checkpoint.restore import newest_sound, read_progress, restore, restore_model
from training.config import TrainConfig
from training.config.batch_schedule import rows_read
from training.config.job import Listener, Start, TrainJob
from training.metrics.metrics_log import Segment, check_history, from_relative
from training.metrics.recorder import NO_UPDATES, Updates
from training.step.program import Program
from training.step.state import TrainState


def data_offset(data: DatasetSpec, train: TrainConfig, step: int) -> dict[str, Any]:
    """The data offset after `step`, as JSON values: sequences read, their length, and the order."""
    rows = rows_read(train, step)
    return {"rows": rows, "sequence_length": data.sequence_length, "order": _order(data, rows)}


def _order(data: DatasetSpec, rows: int) -> str:
    """Digest of all that decides the tokens of the first `rows` sequences, but no file's place."""
    sources = [
        {
            "shards": [[shard.tokens, shard.check] for shard in source.shards],
            "io_block_size": source.io_block_size,
            "window_blocks": source.window_blocks,
            "seed": source.seed,
        }
        for source in data.sources
    ]
    phases = [[phase.start, [float(w).hex() for w in phase.weights]] for phase in data.phases]
    moved = [list(pair) for pair in data.moved if pair[0] < rows]
    more = [moved] if moved else []  # so that other orders keep their digest
    return digest([sources, phases, data.sequence_length, data.tokenizer, data.seed, *more])


def check_data_offset(stored: dict[str, Any], wanted: dict[str, Any], path: str) -> None:
    """Refuse, with `InputError`, to resume from a checkpoint of other data or at another offset."""
    names = {
        "sequence_length": "sequences of {} tokens",
        "order": "data order {:.12}",
        "rows": "{} sequences read",
    }
    for name, words in names.items():
        if stored[name] != wanted[name]:
            raise InputError(
                f"{path} was saved with {words.format(stored[name])}, this run would continue with "
                f"{words.format(wanted[name])}: give it the data, batch size and schedules it had, "
                "or begin a new run from its parameters"
            )


@dataclass(frozen=True)
class InitialState:
    """The state and the progress that a run begins with.

    Attributes:
        step: steps already done; `updates` is what they did, see `training.metrics.recorder`.
        history: metrics logs of these steps.
        copied: whether `history` is another run's, to be copied and not continued in place.
        evaluated: step of the last evaluation, -1 before the first.
        existing: (step, path) of sound checkpoints of this run, oldest first.
        corrupt: (step, path) of newer checkpoints, which are corrupt.
        event: (kind, fields) of the event to report; None for new parameters.
    """

    state: TrainState
    step: int = 0
    history: Sequence[Segment] = ()
    copied: bool = False
    evaluated: int = -1
    updates: Updates = NO_UPDATES
    existing: Sequence[tuple[int, str]] = ()
    corrupt: Sequence[tuple[int, str]] = ()
    event: tuple[str, dict[str, Any]] | None = None


def restore_or_init(job: TrainJob, program: Program, listener: Listener) -> InitialState:
    """Resume, start from another run's checkpoint, or initialize new parameters.

    Raises:
        CorruptOutput: every checkpoint to resume from is corrupt, or the one to start from is.
    """
    found = newest_sound(job.resume_from, program.abstract, listener, _read_progress)
    if found is not None:
        step, path, state, progress = found
        check_data_offset(progress["data_offset"], data_offset(job.data, job.train, step), path)
        count = job.resume_from.index((step, path)) + 1
        return InitialState(
            state,
            step,
            **_carried_over(progress, step),
            existing=job.resume_from[:count],
            corrupt=job.resume_from[count:],
            event=("resumed", {"step": step, "path": path}),
        )
    if job.start is not None:
        return _start_from(job.start, job, program)
    return InitialState(program.init())


def _read_progress(path: str) -> dict[str, Any]:
    """Progress of a checkpoint, with absolute URLs of its history, which is checked to exist."""
    progress = read_progress(path)
    history = from_relative(progress["history"], path)
    check_history(history)
    return {**progress, "history": history}


def _carried_over(progress: dict[str, Any], step: int) -> dict[str, Any]:
    fields = {name: progress[name] for name in ("history", "evaluated")}
    if "skipped" in progress:  # of an earlier version, which counted no applied steps
        skipped, in_a_row = progress["skipped"]
        return {**fields, "updates": Updates(skipped, in_a_row, step - int(skipped))}
    return {**fields, "updates": Updates(*progress["updates"])}


def _start_from(start: Start, job: TrainJob, program: Program) -> InitialState:
    event = ("started_from", {"path": start.checkpoint, "take": start.take})
    if start.take == "everything":
        state = restore(start.checkpoint, program.abstract)
        step, steps = int(state.step), job.train.steps
        if step >= steps:
            raise InputError(
                f"{start.checkpoint} has done {step} steps and TrainConfig.steps is {steps}; to "
                "continue from it set more steps, or choose an earlier checkpoint"
            )
        progress = _read_progress(start.checkpoint)
        wanted = data_offset(job.data, job.train, step)
        check_data_offset(progress["data_offset"], wanted, start.checkpoint)
        begun = InitialState(state, step, **_carried_over(progress, step), copied=True, event=event)
        return replace(begun, updates=begun.updates._replace(applied=0))
    state = program.init()
    model = restore_model(start.checkpoint, program.abstract.model)
    state = eqx.tree_at(lambda s: s.model, state, model)
    if state.ema is not None:  # the EMA starts at the parameters; a copy, as state is donated
        ema = jax.tree.map(jnp.copy, model)
        state = eqx.tree_at(lambda s: s.ema, state, ema)
    if start.take == "moments":
        like = program.abstract.optimizer_state
        moments = restore(start.checkpoint, like, prefix="optimizer_state.")
        state = eqx.tree_at(lambda s: s.optimizer_state, state, moments)
    return InitialState(state, event=event)
