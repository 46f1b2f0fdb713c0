"""A retrain that comes out the same changes nothing further down: training included."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

from experiments.run_200m import experiment
from pipeline.errors import WorkerLost
from pipeline.graph.step import as_node
from pipeline.store import manifest, storage
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import Manifest
from steps.artifacts import Checkpoint
from steps.training.train import drop_checkpoint, record_checkpoint
from tests.pipeline.helpers import bring_up, executed
from tests.steps.mini import MINI
from training.checkpoint.checkpointer import Checkpointer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with the whole experiment, keeping one checkpoint from the middle for good."""
    found = str(tmp_path_factory.mktemp("store"))
    bring_up(found, target())
    return found


def target():
    """The experiment's report; its training also saves checkpoints only to resume from."""
    train = dataclasses.replace(MINI.training, milestones=(3,))
    return experiment.build(dataclasses.replace(MINI, training=train))


def published(store: str, label: str) -> Manifest:
    """The manifest of the newest run's step of that name."""
    node = next(n for n in _above(as_node(target())) if n.label == label)
    found = manifest.load(storage.join(store, node.directory))
    assert found is not None
    return found


def _above(node):
    yield node
    for child in node.inputs.values():
        yield from _above(child)


def test_a_forced_retrain_leaves_what_reads_it_up_to_date(store):
    """Other attempt, other times, other checkpoints to resume from: the same content."""
    before = published(store, "train")
    assert executed(store, target(), force=("train",)) == ["train"]
    after = published(store, "train")
    assert after.attempt != before.attempt
    assert after.result["measured"] != before.result["measured"]
    assert after.content == before.content
    assert executed(store, target()) == []


def test_what_training_says_of_itself_has_no_runtime_settings_and_no_attempt(store):
    """Names by step alone; how it was run is under `measured`, and an artifact has both."""
    found = published(store, "train")
    names = {shard.name for shard in found.shards}
    assert names == {"about", "record", *(f"checkpoint/{n:08d}" for n in (3, 4, 8))}
    assert "log_every" not in found.result["train"]
    assert found.result["train"]["milestones"] == [3]
    node = next(n for n in _above(as_node(target())) if n.label == "train")
    checkpoint = Checkpoint(storage.join(store, node.directory), found)
    seen = dataclasses.replace(MINI.training, milestones=(3,), sequence_length=64, seed=0)
    assert checkpoint.train == seen
    assert checkpoint.model == MINI.model
    contents = {s.name: s.result["content"] for s in found.shards}
    assert contents["checkpoint/00000004"] is None, "saved only to resume from"
    assert contents["checkpoint/00000003"] != contents["checkpoint/00000008"]


def checkpoint_of(root: str, attempt: str, step: int, weight: float) -> str:
    """A complete checkpoint of one array, as the trainer writes it; its URL."""
    path = f"{root}/attempts/{attempt}/checkpoints/{step:08d}.{attempt}"
    saver = Checkpointer(f"{root}/attempts/{attempt}/checkpoints", attempt=attempt)
    saver.save(step, {"w": jnp.full(3, weight)}, {"rows": [{"seconds": weight}]})
    saver.wait()
    return path


def test_two_attempts_record_one_checkpoint_under_one_name(tmp_path):
    """The newer attempt's stands; the older one neither replaces it nor removes it."""
    root, train = str(tmp_path / "train-0"), dataclasses.replace(MINI.training, steps=8)
    ledger, attempts = Ledger(root, "build"), ("000001-abcdabcd", "000002-abcdabcd")
    old, new = (checkpoint_of(root, attempt, 8, 1.0) for attempt in attempts)
    record_checkpoint(ledger, train, 8, old)
    record_checkpoint(ledger, train, 8, new)
    with pytest.raises(WorkerLost):
        record_checkpoint(ledger, train, 8, old)
    drop_checkpoint(ledger, 8, old, attempts[0])
    (shard,) = ledger.finished().values()
    assert shard.name == "checkpoint/00000008"
    assert storage.join(root, shard.root) == new
    drop_checkpoint(ledger, 8, new, attempts[1])
    assert ledger.finished() == {}


def test_the_content_of_a_checkpoint_is_its_arrays(tmp_path):
    """Equal for another attempt with another history; other for other arrays, or another step."""
    root, train = str(tmp_path / "train-0"), dataclasses.replace(MINI.training, keep_every=4)
    contents = []
    for number, (step, weight) in enumerate(((4, 1.0), (4, 1.0), (4, 2.0), (8, 1.0), (7, 1.0))):
        ledger = Ledger(root, f"build{number}")
        path = checkpoint_of(root, f"00000{number}-abcdabcd", step, weight)
        record_checkpoint(ledger, train, step, path)
        (shard,) = ledger.finished().values()
        contents.append(shard.result["content"])
    assert contents[0] == contents[1]
    assert len(set(contents)) == 4
    assert contents[4] is None, "saved only to resume from"
