"""A preempted `train` step: its next attempt loads the compiled program, which is then deleted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from steps.artifacts import Checkpoint
from steps.tokens.sequences import block_shuffle
from steps.training.train import train
from tests.pipeline.helpers import bring_up, check_invariants
from tests.steps.synthetic import VOCAB, synthetic
from tests.training import tiny

CONFIG = dataclasses.replace(tiny.TRAIN, steps=8, checkpoint_every=1000, evaluate_every=1000)


@pytest.fixture
def no_shared_cache():
    """The suite's own compilation cache is off, and JAX keeps every program."""
    least = "jax_persistent_cache_min_compile_time_secs"
    changed = {"jax_compilation_cache_dir": None, least: 0.0}
    before = {name: getattr(jax.config, name) for name in changed}
    for settings in (changed, before):
        for name, value in settings.items():
            jax.config.update(name, value)
        reset_cache()  # JAX 0.12 still reads what it has opened
        if settings is changed:
            yield


def _node():
    sequences = block_shuffle(
        synthetic(), sequence_length=tiny.LENGTH, io_block_size=4, window_blocks=3
    )
    model = dataclasses.replace(tiny.MODEL, vocab_size=VOCAB)
    return train(sequences, model=model, optimizer=tiny.OPTIMIZER, train=CONFIG)


def check_progress(events: list[dict[str, Any]]) -> None:
    """Before the first step, and again in the second attempt, the phases that lead to it."""
    kinds = [e["phase"] if e["event"] == "phase" else e.get("unit", "") for e in events]
    shown = [kind for kind, _ in itertools.groupby(filter(None, kinds))]
    begun = ["importing", "restoring and compiling", "steps"]
    assert [kind for kind in shown if kind in begun] == 2 * begun
    (resumed,) = [kind for kind in shown if kind.startswith("resumed from step ")]
    assert shown.index(resumed) > shown.index("steps")


class Preempting(list[dict[str, Any]]):
    """Events of a run that is preempted after its first step; `between` runs before it resumes."""

    def __init__(self, between: Callable[[], None]) -> None:
        super().__init__()
        self.between, self.stopped = between, False

    def append(self, event: dict[str, Any]) -> None:
        super().append(event)
        if event["event"] == "progress" and event.get("unit") == "steps" and not self.stopped:
            self.stopped = True
            os.kill(os.getpid(), signal.SIGTERM)
        if event["event"] == "retried":
            self.between()


@pytest.mark.slow
def test_training_continues_from_checkpoints_of_other_code(tmp_path):
    """An edit drops none of them, and is said in one line."""

    def edited() -> None:
        for path in tmp_path.rglob("train-*/ledger/*/*.json"):
            record = json.loads(path.read_text())
            path.write_text(json.dumps({**record, "code": "0123456789abcdef"}))

    events = Preempting(edited)
    bring_up(str(tmp_path), _node(), events=events)
    warned = [event["message"] for event in events if event["event"] == "warning"]
    assert warned == ["continues from what other code wrote"]
    phases = [event["phase"] for event in events if event["event"] == "phase"]
    assert [phase for phase in phases if phase.startswith("resumed from step ")]
    check_invariants(str(tmp_path))


@pytest.mark.slow
def test_the_next_attempt_does_not_compile_and_nothing_of_it_is_left(tmp_path, no_shared_cache):
    """Its rows say so; the finished output has no program."""
    kept: list[Path] = []
    events = Preempting(lambda: kept.extend(tmp_path.rglob("compiled/*/jit_train_step-*")))
    execution = bring_up(str(tmp_path), _node(), events=events)
    check_progress(events)
    assert len(kept) == 1
    (found,) = [
        each for each in execution.published.values() if "checkpoint" in each.manifest.result
    ]
    trained = Checkpoint(found.path, found.manifest)
    assert trained.manifest.shard("checkpoint/00000008").result["progress"] == "step 8 of 8 saved"
    assert [attempt.loaded for attempt in trained.attempts] == [False, True]
    assert found.manifest.result["measured"]["compilations"] == 0
    assert not list(tmp_path.rglob("compiled"))
