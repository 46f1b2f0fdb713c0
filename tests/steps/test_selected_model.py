"""The best model of a sweep, used as any other: trained on, and found by its directory."""

from __future__ import annotations

import dataclasses
import math

import pytest

from pipeline import select, sweep
from pipeline.graph.step import as_node
from pipeline.store import storage
from steps.checkpoints.find import find
from steps.evaluation.evaluate import evaluate
from steps.pages.compare import noise
from steps.pages.run_record import of_checkpoint
from steps.tokens.sequences import block_shuffle
from steps.training.continue_training import extend, warm_start
from steps.training.train import train
from tests.pipeline.helpers import bring_up, result
from tests.steps.evaluation.test_train_on import CONSTANT, EIGHT, FOUR, MODEL, built, sequences
from tests.steps.synthetic import synthetic
from tests.training import tiny
from training.metrics.differences import RunLoss, SequenceLosses, differences

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


def recipe(name):
    """A model of a rate; a digit in the name stands for seeds of its own."""
    order, seed = int(name[-1]), int(name[-1]) or None
    data = block_shuffle(
        synthetic(high=8), tiny.LENGTH, io_block_size=4, window_blocks=3, seed=order
    )
    rate = WORSE if name.startswith("low") else CONSTANT
    return train(data, model=MODEL, optimizer=rate, train=dataclasses.replace(FOUR, seed=seed))


def test_a_selection_says_which_differences_are_noise(store):
    """Runs that differ in seeds are one recipe; scores in bits per byte are compared as losses."""
    names = ["low 0", "low 1", "high 0", "high 1"]
    models = sweep(recipe, {name: name for name in names})
    chosen = built(store, select(models, by="last.loss")).result
    index = chosen["selected"]["index"]
    assert index in (2, 3)
    rows = chosen["measured"]["candidates"]
    assert [len(row["differences"]) for row in rows] == [2, 2, 0, 0]
    seeds, paired = rows[0]["differences"]
    losses = [row["value"] for row in rows]
    runs = [built(store, model) for model in models]
    for one in (seeds, paired):
        want = (losses[0] + losses[1] - losses[2] - losses[3]) / 2
        assert one["difference"] == pytest.approx(want)
    assert seeds["how"] == "over 2 and 2 seeds"
    spreads = losses[0] - losses[1], losses[2] - losses[3]  # each has half its square as variance
    assert seeds["standard_error"] == pytest.approx(math.hypot(*spreads) / 2)
    sums = [SequenceLosses.of_row(run.sequence_rows()[0]) for run in runs]
    assert paired["how"] == f"paired over {sums[0].sequences} sequences"
    assert "within noise" not in chosen["headline"][0] or seeds["within_noise"]
    record = [of_checkpoint(run, name, []) for run, name in zip(runs, names, strict=True)]
    assert [one.to_json() for _, one in noise(record)] == [seeds, paired]
    assert record[2].recipe == record[3].recipe != record[0].recipe == record[1].recipe

    scores = sweep(lambda n: evaluate(recipe(n), synthetic(high=8)), {n: n for n in names[::2]})
    by_bits = built(store, select(scores, by="bits_per_byte")).result
    (of_scores,) = by_bits["measured"]["candidates"][0]["differences"]
    pairs = differences([RunLoss(str(n), 0.0, "", each) for n, each in enumerate(sums[::2])], 1)
    ratio = by_bits["bits_per_byte"] / by_bits["loss"]
    assert of_scores["standard_error"] == pytest.approx(next(pairs).error * ratio, rel=1e-5)


def test_a_selection_by_another_number_says_nothing_of_noise(store):
    """Nor is a loss of another evaluation than the last one known by sequence."""
    chosen = built(store, select((recipe("low 0"), recipe("high 0")), by="first.loss")).result
    assert all(row.keys() == {"step", "value"} for row in chosen["measured"]["candidates"])
