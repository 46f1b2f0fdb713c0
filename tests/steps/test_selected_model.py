"""The best model of a sweep, used as any other: trained on, and found by its directory."""

from __future__ import annotations

import dataclasses

import pytest

from pipeline import select, sweep
from pipeline.graph.step import as_node
from pipeline.store import storage
from steps.checkpoints.find import find
from steps.evaluation.evaluate import evaluate
from steps.training.continue_training import extend, warm_start
from steps.training.train import train
from tests.pipeline.helpers import bring_up, result
from tests.steps.evaluation.test_train_on import CONSTANT, EIGHT, FOUR, MODEL, built, sequences
from tests.steps.synthetic import synthetic
from tests.training import tiny

pytestmark = pytest.mark.slow


WORSE = dataclasses.replace(CONSTANT, learning_rate=1e-5)


def few_ids():
    """Of which a step or two at the larger rate learns that there are few."""
    return sequences(high=8)


def trained(optimizer):
    return train(few_ids(), model=MODEL, optimizer=optimizer, train=FOUR)


def selected():
    """Of two, the one with the larger rate."""
    return select(sweep(trained, {"low": WORSE, "high": CONSTANT}), by="last.loss")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return str(tmp_path_factory.mktemp("store"))


def directory(store, node) -> str:
    """URL of a step's directory, after it was built."""
    bring_up(store, node)
    return storage.join(store, as_node(node).directory)


def test_a_selected_model_is_extended_as_the_winner_is(store):
    """With the data it was trained on, and no other."""
    assert built(store, selected()).result["selected"]["index"] == 1
    more = {"optimizer": CONSTANT, "train": EIGHT}
    rows = [
        tiny.learned(built(store, extend(model, few_ids(), **more)).rows("history"))
        for model in (selected(), trained(CONSTANT))
    ]
    assert len(rows[0]) == 8
    assert rows[0] == rows[1]


def test_a_selected_model_starts_another_run(store):
    """On other data of the same tokenizer, and is scored on the text it was trained on."""
    warm = warm_start(selected(), sequences(low=5), take="model", optimizer=CONSTANT, train=FOUR)
    assert built(store, warm).result["last"]["step"] == 4
    scores = [evaluate(model, synthetic(high=8)) for model in (selected(), trained(CONSTANT))]
    bring_up(store, *scores)
    assert result(store, scores[0])["loss"] == result(store, scores[1])["loss"]


def test_the_directory_of_a_selection_is_a_trained_model(store):
    """The winner's last checkpoint, with the winner's data; only the directory is its own."""
    best, winner = (directory(store, node) for node in (selected(), trained(CONSTANT)))
    assert dataclasses.replace(find(best), root=winner) == find(winner)
    assert find(best).path.startswith(winner)
    assert find(best).sequences == directory(store, few_ids())
