"""Schedules of batch and length: which rows a step reads, and runs through several phases."""

import dataclasses
import os
import signal
import threading

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.shape import presets
from tests.training import tiny
from training.config import OptimizerConfig, TrainConfig
from training.config.batch_schedule import (
    batch_phases,
    dropped,
    due,
    kept_for_good,
    read_by,
    rows_read,
    step_that_reads,
)
from training.cost.memory_estimate import GIB
from training.cost.memory_plan import Devices
from training.cost.resolved_run import resolve_run
from training.step.program import build_programs
from training.trainer import compile_ahead, run_context

NUMBERS = st.sampled_from([1, 2, 4, 8])


def schedule(first):
    """Pairs (steps done, value) in rising order."""
    pairs = st.dictionaries(st.integers(first, 12), NUMBERS, max_size=4)
    return pairs.map(lambda found: tuple(sorted(found.items())))


CONFIGS = st.builds(
    TrainConfig,
    steps=st.integers(1, 12),
    batch_size=st.just(4),
    sequence_length=st.just(16),
    batch_schedule=schedule(1),
    length_schedule=schedule(0),
)


@given(CONFIGS)
def test_every_step_reads_the_rows_after_the_last_ones(config):
    """Position, batch and length of each step are what walking from step to step gives."""
    sizes, cuts = dict(config.batch_schedule), dict(config.length_schedule)
    want, rows, pieces, position = [], 4, 1, 0
    for step in range(config.steps):
        rows, pieces = sizes.get(step, rows), cuts.get(step, pieces)
        want.append((position, rows * pieces, 16 // pieces))
        position += rows
    got = [
        (phase.data_offset + (step - phase.first) * phase.rows, c.batch_size, c.sequence_length)
        for phase in batch_phases(config)
        for c in [phase.config(config)]
        for step in range(phase.first, phase.end)
    ]
    assert got == want


def test_rows_are_cut_in_the_order_of_the_text():
    """Pieces of a row follow each other and keep their tokens."""
    phase = batch_phases(
        TrainConfig(steps=1, batch_size=2, sequence_length=6, length_schedule=((0, 3),))
    )
    stored, pieces = np.arange(12).reshape(2, 6), np.arange(12).reshape(6, 2)
    for rows in ([0, 1, 2, 3, 4, 5], [0, 1, 2], [2, 3], [4], [0, 5]):
        rows = np.array(rows)
        read = phase[0].read_rows(rows)
        assert phase[0].cut(stored[read], rows).tolist() == pieces[rows].tolist()


SCHEDULED = {"batch_schedule": ((2, 16),), "length_schedule": ((0, 4), (4, 1))}


@pytest.mark.slow
def test_a_scheduled_run_compiles_once_a_phase_and_resumes_anywhere(data, tmp_path):
    """Tokens per step follow the schedules; resumed in each phase, the end has the same bits."""
    heard = tiny.Heard()
    job = tiny.make_job(data, train=SCHEDULED, checkpoint_directory=str(tmp_path / "whole"))
    whole = tiny.run(job, heard)
    assert whole.compilations == 3
    length, predicted = tiny.LENGTH, []
    for rows, pieces in ((8, 4), (8, 4), (16, 4), (16, 4), (16, 1), (16, 1)):
        predicted.append(rows * (length - pieces))  # the last token of a sequence has no target
    assert [row["tokens"] for row in tiny.rows(whole)] == predicted
    for step, compilations in ((1, 3), (3, 2)):
        done, there = tuple(heard.committed[:step]), str(tmp_path / str(step))
        got = tiny.run(job, resume_from=done, checkpoint_directory=there)
        assert got.compilations == compilations
        tiny.assert_same_run(got, whole)


@pytest.mark.parametrize("schedule", [(), ((2, tiny.BATCH),), ((2, 2 * tiny.BATCH),)])
def test_phases_reach_the_last_step(schedule):
    """Also where a phase has the batch of the one before it."""
    config = dataclasses.replace(tiny.TRAIN, batch_schedule=schedule)
    one = Devices("cpu", 1)
    ends = [*(first for first, _ in schedule), tiny.TRAIN.steps]
    for done in range(tiny.TRAIN.steps):
        found = resolve_run(tiny.MODEL, tiny.OPTIMIZER, config, one, done=done)
        assert [each.phase.end for each in found.phases] == [end for end in ends if end > done]


@pytest.mark.parametrize(
    ("changes", "done", "batch"),
    [
        ({"batch_size": 2, "length_schedule": ((0, 4),)}, 0, 8),
        ({"batch_size": 4, "length_schedule": ((0, 4),), "microbatches": 2}, 0, 16),
        ({"batch_size": 4, "batch_schedule": ((4, 8),)}, 4, 8),
        ({"batch_size": 3, "batch_schedule": ((4, 8), (6, 9))}, 5, 8),
    ],
)
def test_batches_that_no_step_has_are_not_refused(changes, done, batch):
    """Uncut ones, and those of steps that are done or beyond the last, on eight devices."""
    config = dataclasses.replace(tiny.TRAIN, **changes)
    setting = {"eos_id": tiny.EOS, "done": done}
    found = build_programs(tiny.MODEL, tiny.OPTIMIZER, config, jax.devices()[:8], **setting)
    assert [program.train.batch_size for _, program in found.phases] == [batch]


@pytest.mark.parametrize("largest", [256, 512])
def test_the_largest_phase_decides_the_sharding(largest):
    """On 16 chips of v6e, the first phase alone would copy the state."""
    chips = Devices("tpu", 16, limit=31.25 * GIB)
    train = TrainConfig(steps=100, batch_size=16, sequence_length=4096)
    growing = dataclasses.replace(train, batch_schedule=((50, largest), (90, 32)))
    alone = dataclasses.replace(train, batch_size=largest)
    found = [
        resolve_run(presets.tomat_1b, OptimizerConfig(), each, chips).phases[0].train.parallel
        for each in (train, growing, alone)
    ]
    assert [parallel.sharding for parallel in found] == ["replicated", "zero1", "zero1"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["the phase's last step", "the next phase's compilation"])
def test_a_signal_between_two_phases_saves_at_once(data, tmp_path, monkeypatch, sigterm, moment):
    """Neither a step of the next phase nor the end of its compilation is waited for."""
    train = {"batch_schedule": ((3, 16),), "checkpoint_every": 1000, "evaluate_every": 1000}
    job = tiny.make_job(data, train=train, checkpoint_directory=str(tmp_path))
    committed, compiled, saved = [], [], threading.Event()
    compiling = compile_ahead.PhaseCompiler._compile

    def compile(self, phase):
        compiled.append(phase.first)
        if phase.first:
            os.kill(os.getpid(), signal.SIGTERM)
            assert saved.wait(60), "nothing was saved while it compiled"
        return compiling(self, phase)

    def on_commit(step, path):
        committed.append((step, path))
        saved.set()

    class Watched(run_context.Watchdog):
        def beat(self, step):
            super().beat(step)
            if step == 3 and moment == "the phase's last step":
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run_context, "Watchdog", Watched)
    monkeypatch.setattr(compile_ahead.PhaseCompiler, "_compile", compile)
    stopped = tiny.run(job, tiny.Heard(commit=on_commit))
    assert (stopped.preempted, stopped.steps) == (True, 3)
    assert len(tiny.entries(job, "preempted")) == 1
    assert committed == [(3, stopped.checkpoint)]
    assert compiled == ([0] if moment == "the phase's last step" else [0, 3])
    monkeypatch.undo()
    got = tiny.run(job, resume_from=tuple(committed), attempt="1")
    tiny.assert_same_run(got, tiny.run(job, checkpoint_directory=str(tmp_path / "whole")))


STEPS = st.lists(st.integers(1, 60), max_size=30).map(sorted)


@given(
    STEPS,
    st.integers(1, 5),
    st.integers(0, 12),
    st.lists(st.integers(1, 60), max_size=4).map(tuple),
)
def test_dropped_are_those_that_no_rule_keeps(steps, newest, every, milestones):
    """Position by position: newest, multiple, or milestone."""
    kept = set()
    for position in range(len(steps)):
        if sum(1 for later in range(position + 1, len(steps))) < newest:
            kept.add(position)
        if every and steps[position] in range(0, 1000, every):
            kept.add(position)
        if steps[position] in list(milestones):
            kept.add(position)
    rules = {"keep_checkpoints": newest, "keep_every": every, "milestones": milestones}
    found = dropped(steps, TrainConfig(batch_size=1, **rules))
    assert found == sorted(set(range(len(steps))) - kept)


@given(
    st.integers(1, 200),
    st.integers(1, 50),
    st.integers(0, 50),
    st.sets(st.integers(1, 200), max_size=3),
)
def test_due(step, every, keep, milestones):
    """At multiples of either, at milestones and at the end; kept for good but for the first."""
    train = TrainConfig(
        steps=200,
        batch_size=1,
        sequence_length=2,
        checkpoint_every=every,
        keep_every=keep,
        milestones=tuple(milestones),
    )
    kept = step in milestones or step == 200 or (keep > 0 and step in range(keep, 201, keep))
    assert kept_for_good(step, train) == kept
    assert due(step, train) == (kept or step in range(every, 201, every))


@given(CONFIGS)
def test_a_position_is_read_by_one_step(config):
    """Steps read all positions once, in order, and a position leads back to its step and row."""
    read = [(step, list(read_by(config, step)[1])) for step in range(1, config.steps + 1)]
    assert [at for _, positions in read for at in positions] == list(
        range(rows_read(config, config.steps))
    )
    for step, positions in read:
        assert [step_that_reads(config, at)[1:] for at in positions] == [
            (step, row) for row in range(len(positions))
        ]
