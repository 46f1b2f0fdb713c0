"""A preempted `train` step: its next attempt loads the compiled program, which is then dropped."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import signal
from typing import Any

import jax
import pytest

from pipeline.errors import StorageError
from pipeline.graph.step_context import StepContext
from pipeline.store import storage
from pipeline.store.ledger import Ledger
from steps.artifacts import Checkpoint
from steps.tokens.block_shuffle import block_shuffle
from steps.training.train import PROGRAMS, earlier_programs, record_program, train
from tests.pipeline.helpers import bring_up, check_invariants, ledgers
from tests.steps.synthetic import VOCAB, synthetic
from tests.training import tiny
from training.config.job import KeptProgram

CONFIG = dataclasses.replace(tiny.TRAIN, steps=8, checkpoint_every=1000, evaluate_every=1000)


@pytest.fixture
def no_shared_cache():
    """The suite's own compilation cache is off."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def _node():
    sequences = block_shuffle(
        synthetic(), sequence_length=tiny.LENGTH, io_block_size=4, window_blocks=3
    )
    model = dataclasses.replace(tiny.MODEL, vocab_size=VOCAB)
    return train(sequences, model=model, optimizer=tiny.OPTIMIZER, train=CONFIG)


def test_programs_go_through_the_ledger(tmp_path):
    """The next attempt gets them with their digests and owns them; of a damaged record, none."""
    ledger, data, warned = Ledger(str(tmp_path)), b"a program", []
    path = tmp_path / "attempts/000001-a/programs/0123/step.xla"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    kept = KeptProgram(
        path=str(path),
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        made_for={"program": "0123"},
    )
    record_program(ledger, kept)
    workers: Any = None
    run = StepContext(ledger, "train", "000002-b", warned.append, workers)
    assert earlier_programs(run) == (kept,)
    (record,) = (tmp_path / "ledger/first").glob("binary~*.json")
    assert '"owner": "000002-b"' in record.read_text()
    record.write_text(record.read_text()[:-9])
    assert (earlier_programs(run), len(warned)) == ((), 1)
    with pytest.raises(StorageError, match="does not read back"):
        record_program(ledger, dataclasses.replace(kept, size=1))


def check_progress(events: list[dict[str, Any]]) -> None:
    """Before the first step, and again in the second attempt, the phases that lead to it."""
    kinds = [e["phase"] if e["event"] == "phase" else e.get("unit", "") for e in events]
    shown = [kind for kind, _ in itertools.groupby(filter(None, kinds))]
    begun = ["importing", "restoring and compiling", "steps"]
    assert [kind for kind in shown if kind in begun] == 2 * begun
    (resumed,) = [kind for kind in shown if kind.startswith("resumed from step ")]
    assert shown.index(resumed) > shown.index("steps")


@pytest.mark.slow
def test_training_continues_from_checkpoints_of_other_code(tmp_path):
    """An edit drops none of them, and is said in one line."""
    stopped: list[int] = []

    class Events(list):
        def append(self, event):
            super().append(event)
            if event["event"] == "progress" and event.get("unit") == "steps" and not stopped:
                stopped.append(1)
                os.kill(os.getpid(), signal.SIGTERM)
            if event["event"] == "retried":  # as if another attempt's code had written them
                for path in tmp_path.rglob("train-*/ledger/*/*.json"):
                    record = json.loads(path.read_text())
                    path.write_text(json.dumps({**record, "code": "0123456789abcdef"}))

    events: list[dict[str, Any]] = Events()
    bring_up(str(tmp_path), _node(), events=events)
    warned = [event["message"] for event in events if event["event"] == "warning"]
    assert warned == ["continues from what other code wrote"]
    phases = [event["phase"] for event in events if event["event"] == "phase"]
    assert [phase for phase in phases if phase.startswith("resumed from step ")]
    check_invariants(str(tmp_path))


@pytest.mark.slow
def test_the_next_attempt_loads_the_step_and_nothing_of_it_is_published(tmp_path, no_shared_cache):
    """Journals say so; the finished output has no program, in files, ledger or manifest."""
    recorded: list[set[str]] = []

    class Events(list):
        def append(self, event):
            super().append(event)
            if event["event"] == "progress" and event.get("unit") == "steps" and not recorded:
                recorded.append(set())
                os.kill(os.getpid(), signal.SIGTERM)
            if event["event"] == "retried":
                # After the first attempt has ended and before the next begins.
                for path in (tmp_path).rglob("ledger/*/binary~*.json"):
                    recorded[0].add(path.name)

    node, events = _node(), Events()
    execution = bring_up(str(tmp_path), node, events=events)
    check_progress(events)
    (record,) = recorded[0]
    assert record.startswith(PROGRAMS.replace("/", "~"))
    (found,) = [
        each for each in execution.published.values() if "checkpoint" in each.manifest.result
    ]
    trained = Checkpoint(found.path, found.manifest)
    assert trained.manifest.shard("checkpoint/00000008").result["progress"] == "step 8 of 8 saved"
    journals = storage.read_bytes(storage.join(trained.shard("record"), "journals.jsonl"))
    first, second = journals.decode().splitlines()
    assert '"loaded": false' in first
    assert '"loaded": true' in second
    assert found.manifest.result["measured"]["compilations"] == 0
    assert not [shard.name for shard in found.manifest.shards if shard.name.startswith(PROGRAMS)]
    assert not [n for each in ledgers(found.path) for n in each.shard_names() if PROGRAMS in n]
    assert not list(tmp_path.rglob("step.xla"))
