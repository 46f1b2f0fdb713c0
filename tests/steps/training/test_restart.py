"""A preempted `train` step: its next attempt loads the compiled program, which is then deleted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
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


@pytest.mark.slow
def test_the_next_attempt_takes_over_checkpoints_and_programs(tmp_path, no_shared_cache):
    """Also of other code, which is said in one line; the finished output has no program."""
    stopped: list[str] = []
    kept: list[Path] = []

    class Events(list):
        def append(self, event):
            super().append(event)
            if event["event"] == "progress" and event.get("unit") == "steps" and not stopped:
                stopped.append("")
                os.kill(os.getpid(), signal.SIGTERM)
            if event["event"] == "retried":
                kept.extend(tmp_path.rglob("compiled/*/jit_train_step-*"))
                for path in tmp_path.rglob("train-*/ledger/*/*.json"):  # as if of other code
                    record = json.loads(path.read_text())
                    path.write_text(json.dumps({**record, "code": "0123456789abcdef"}))

    events: list[dict[str, Any]] = Events()
    execution = bring_up(str(tmp_path), _node(), events=events)
    check_progress(events)
    warned = [event["message"] for event in events if event["event"] == "warning"]
    assert warned == ["continues from what other code wrote"]
    check_invariants(str(tmp_path))
    assert len(kept) == 1
    (found,) = [
        each for each in execution.published.values() if "checkpoint" in each.manifest.result
    ]
    trained = Checkpoint(found.path, found.manifest)
    assert trained.manifest.shard("checkpoint/00000008").result["progress"] == "step 8 of 8 saved"
    assert [attempt.loaded for attempt in trained.attempts] == [False, True]
    assert found.manifest.result["measured"]["compilations"] == 0
    assert not list(tmp_path.rglob("compiled"))
