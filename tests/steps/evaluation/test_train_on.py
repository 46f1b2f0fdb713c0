"""Extending a run and starting another from it, as steps of a graph."""

import dataclasses
import os
from functools import partial

import jax
import pytest

from models.shape.config import YarnScaling
from pipeline.errors import InputError, StepFailed
from pipeline.graph.step import as_node
from pipeline.store.shards import check_sizes
from steps.artifacts import Checkpoint
from steps.tokens.sequences import block_shuffle
from steps.training.continue_training import extend, warm_start
from steps.training.plan.experience import STEP
from steps.training.train import train
from tests.pipeline.helpers import bring_up
from tests.steps.built import built as artifact
from tests.steps.synthetic import VOCAB, synthetic
from tests.training import tiny
from training.fault import Watchdog
from training.trainer import trainer

pytestmark = pytest.mark.slow  # the first of them trains

MODEL = dataclasses.replace(tiny.MODEL, vocab_size=VOCAB)
CONSTANT = dataclasses.replace(tiny.OPTIMIZER, schedule="constant")
FOUR = dataclasses.replace(tiny.TRAIN, steps=4, checkpoint_every=2)
EIGHT = dataclasses.replace(FOUR, steps=8)


def sequences(**settings):
    return block_shuffle(
        synthetic(**settings), sequence_length=tiny.LENGTH, io_block_size=4, window_blocks=3
    )


def trained(config=FOUR, data=None):
    return train(data or sequences(), model=MODEL, optimizer=CONSTANT, train=config)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return str(tmp_path_factory.mktemp("store"))


built = partial(artifact, kind=Checkpoint)


def test_an_extension_has_the_losses_of_the_longer_run(store):
    """From a checkpoint in its middle: what that had done is not done again."""
    whole = built(store, trained(EIGHT))
    longer = built(store, extend(trained(), sequences(), optimizer=CONSTANT, train=EIGHT, at=2))
    assert tiny.learned(longer.rows("history")) == tiny.learned(whole.rows("history"))
    assert longer.result["last"] == whole.result["last"]


def test_batches_that_are_done_need_not_divide_over_the_devices(store, monkeypatch):
    """Of 4 rows on four devices, before 8 on eight: published, without the record of its step."""
    few = dataclasses.replace(FOUR, steps=2, batch_size=4)
    loop = trainer.train
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train", partial(loop, devices=jax.devices()[:4]))
        assert STEP in built(store, trained(few)).result["measured"]
    more = dataclasses.replace(few, steps=4, batch_schedule=((2, 8),))
    longer = built(store, extend(trained(few), sequences(), optimizer=CONSTANT, train=more))
    assert longer.result["last"]["step"] == 4
    assert longer.trained_on.startswith("local: 8 x")
    assert STEP not in longer.result["measured"]


def test_an_extension_speaks_of_the_sets_it_was_evaluated_on(store):
    """Not of those of the run that it goes on with, whose last row is older."""
    data = sequences(held_out=("validation", "test"))
    whole = trained(data=data)
    longer = extend(whole, data, optimizer=CONSTANT, train=EIGHT, splits=("test",))
    last = built(store, longer).result["last"]
    assert (last["split"], last["step"]) == ("test", 8)


def test_a_warm_start_begins_a_run_of_its_own(store):
    """With the moments or without, its first loss is that of the parameters it was given."""
    cold = built(store, trained()).rows("history")
    model, moments = (
        built(
            store, warm_start(trained(), sequences(), take=take, optimizer=CONSTANT, train=FOUR)
        ).rows("history")
        for take in ("model", "moments")
    )
    assert [row["step"] for row in model] == [1, 2, 3, 4]
    assert model[0]["loss"] == moments[0]["loss"] != cold[0]["loss"]
    assert model[1]["loss"] != moments[1]["loss"]
    assert [row["learning_rate"] for row in model] == [row["learning_rate"] for row in cold]


def test_parameters_go_on_as_a_model_of_longer_sequences(store):
    """Another length and YaRN: its key and its record have them, also after an extension of it."""
    stretched = dataclasses.replace(
        MODEL, rope_scaling=YarnScaling(factor=2.0, original_context=tiny.LENGTH)
    )
    longer = block_shuffle(
        synthetic(), sequence_length=2 * tiny.LENGTH, io_block_size=4, window_blocks=3
    )
    config = dataclasses.replace(FOUR, sequence_length=2 * tiny.LENGTH)
    rest = {"optimizer": CONSTANT, "train": config}
    own, warm = (
        warm_start(trained(), longer, take="model", **more, **rest)
        for more in ({}, {"model": stretched})
    )
    assert as_node(own).key != as_node(warm).key
    more = {**rest, "train": dataclasses.replace(config, steps=6)}
    found = [built(store, node) for node in (own, warm, extend(warm, longer, **more))]
    assert [each.model for each in found] == [MODEL, stretched, stretched]
    assert found[0].rows("evaluations")[0]["loss"] != found[1].rows("evaluations")[0]["loss"]
    with pytest.raises(InputError, match=r"model: mlp 64 -> 32: .* expected changes of window"):
        warm_start(warm, longer, take="model", model=dataclasses.replace(MODEL, mlp=32), **rest)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (
            lambda: extend(trained(), sequences(low=5), optimizer=CONSTANT, train=EIGHT),
            "to train on other data use warm_start",
        ),
        (
            lambda: extend(trained(), sequences(), optimizer=CONSTANT, train=EIGHT, at=3),
            r"no checkpoint of step 3; there are \[2, 4\]",
        ),
        (
            lambda: warm_start(
                trained(), sequences(tokenizer="u"), take="model", optimizer=CONSTANT, train=FOUR
            ),
            "tokenize the documents with the model's tokenizer",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(store, node, words):
    with pytest.raises(StepFailed, match=words):
        bring_up(store, node())


def test_a_damaged_checkpoint_that_is_not_the_last_is_left_out_of_what_is_published(
    tmp_path, monkeypatch
):
    """With a warning; the last one and the curves are as sound as without."""
    beat, config = Watchdog.beat, dataclasses.replace(FOUR, milestones=(1,))

    def damage(watchdog, step):
        beat(watchdog, step)
        if step == 4:
            (first,) = tmp_path.glob("train-*/attempts/*/checkpoints/00000001.*")
            os.truncate(first / "arrays" / "step" / "c", 1)

    monkeypatch.setattr(Watchdog, "beat", damage)
    run = built(str(tmp_path), trained(config))
    assert list(run.steps) == [2, 4]
    assert run.result["last"]["step"] == 4


def test_a_run_that_passed_a_damaged_checkpoint_over_is_published(tmp_path, monkeypatch):
    """And what it leaves names no damaged file."""
    beat = Watchdog.beat

    def fail(watchdog, step):
        beat(watchdog, step)
        if step == 6:
            raise RuntimeError("the machine burned down")

    monkeypatch.setattr(Watchdog, "beat", fail)
    with pytest.raises(StepFailed, match="burned down"):
        bring_up(str(tmp_path), trained(EIGHT))
    monkeypatch.undo()
    newest = max(tmp_path.glob("train-*/attempts/*/checkpoints/*"), key=lambda path: path.name)
    os.truncate(newest / "arrays" / "step" / "c", 1)
    run = built(str(tmp_path), trained(EIGHT))
    assert not any(newest.name in shard.name for shard in run.manifest.shards)
    assert run.result["last"]["step"] == 8
    check_sizes(run.path, run.manifest.shards, "")
