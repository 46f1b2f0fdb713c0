"""What differs between runs of which some go on from others, or were chosen among others."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from pipeline import named, select, sweep
from pipeline.graph.step import as_node
from pipeline.store import storage
from steps.artifacts import Checkpoint, Report
from steps.pages.compare import compare, differences, record_named
from steps.pages.run_record import of_directory
from steps.training.continue_training import extend, warm_start
from steps.training.train import train
from tests.pipeline.helpers import bring_up
from tests.steps.built import built
from tests.steps.evaluation.test_train_on import CONSTANT, EIGHT, FOUR, MODEL, sequences

pytestmark = pytest.mark.slow  # the first of them trains

LOW = dataclasses.replace(CONSTANT, learning_rate=1e-3)


def trained(optimizer=CONSTANT, config=FOUR):
    return train(sequences(), model=MODEL, optimizer=optimizer, train=config)


def rates():
    """Runs of two learning rates, labelled with them."""
    return sweep(trained, {"low": LOW, "high": CONSTANT})


def longer(model, at=None):
    return extend(model, sequences(), optimizer=CONSTANT, train=EIGHT, at=at)


def warm(model, take):
    """On other data than the model was trained on."""
    return warm_start(model, sequences(low=5), take=take, optimizer=CONSTANT, train=FOUR)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return str(tmp_path_factory.mktemp("store"))


def compared(store, **runs):
    """The rows of the table, below its head."""
    bring_up(store, *runs.values())
    records = [
        record_named(f"{name}={storage.join(store, as_node(run).directory)}")
        for name, run in runs.items()
    ]
    head, *rows = differences(records)
    assert head == ["setting", *runs]
    return rows


def test_an_extension_differs_from_the_run_in_one_go_by_what_it_continues(store):
    """And by no setting: it has the model and the data of the run before, and its own schedule."""
    first = as_node(trained()).directory
    rows = compared(
        store,
        whole=trained(config=EIGHT),
        end=longer(named(trained(), "train[0.01]")),
        middle=longer(trained(), at=2),
    )
    (row,) = rows
    # The label is that of whoever built it first.
    label = row[2].partition(" ")[0]
    assert row == ["continues", "-", f"{label} at step 4 ({first})", f"{label} at step 2 ({first})"]


def test_what_an_earlier_run_was_told_is_not_what_a_later_one_was(store):
    """Two that go on alike from runs of different rates: which runs is all there is to say."""
    low, high = rates()
    (row,) = compared(store, low=longer(low), high=longer(high))
    assert row[0] == "continues"
    assert row[1].endswith(f" at step 4 ({as_node(low).directory})")
    assert row[2].endswith(f" at step 4 ({as_node(high).directory})")


def test_a_warm_start_says_what_it_took_and_what_it_is_trained_on(store):
    """The settings of its own data, and not those of the data of the model it began with."""
    model = trained()
    rows = compared(store, cold=model, model=warm(model, "model"), moments=warm(model, "moments"))
    data, continues = rows
    assert data == ["synthetic.low", "1", "5", "5"]
    assert continues[:2] == ["continues", "-"]
    assert continues[2].startswith("with the model of ")
    assert continues[3].startswith("with the model and moments of ")


def test_a_selected_run_is_the_run_that_was_chosen(store):
    """Nothing differs, also between what goes on from the one and from the other."""
    low, high = rates()
    best = select((low, high), by="first.step", mode="max")  # of equals the first
    assert compared(store, selected=best, winner=low) == []
    assert compared(store, selected=longer(best), winner=longer(low)) == []
    assert compared(store, selected=best, other=high) == [
        ["optimizer.learning_rate", "0.001", "0.01"]
    ]


def test_a_run_is_the_same_from_its_lines_and_from_its_manifest(store):
    """No setting differs, and no loss."""
    found = built(store, trained(), Checkpoint)
    attempt = storage.join(found.home, "attempts", found.manifest.attempt)
    both = [of_directory(attempt, "lines"), record_named(f"manifest={found.path}")]
    assert differences(both) == [["setting", "lines", "manifest"]]
    assert [row["loss"] for row in both[0].history] == [row["loss"] for row in both[1].history]


def test_the_page_of_a_graph_says_it_too(store):
    """Under the names that the graph gives to the runs."""
    low, high = rates()
    best = select((low, high), by="first.step", mode="max")
    page = compare((best, longer(best)), names=("best", "longer"))
    text = storage.read_bytes(built(store, page, Report).page).decode()
    for words in ("<th>best</th><th>longer</th>", "Loss on validation", "% of the wall time"):
        assert words in text
    assert f" at step 4 ({as_node(low).directory})</td>" in text
    assert "model.embed" not in text


def test_a_run_whose_beginning_was_deleted_is_compared(store, tmp_path):
    """It says that what it went on from is gone."""
    more = longer(trained(), at=2)
    bring_up(store, more)
    shutil.copytree(store, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / as_node(trained()).directory)
    found = record_named(f"more={tmp_path / 'copy' / as_node(more).directory}")
    assert found.config["continues"] == f"{as_node(trained()).directory} at step 2, which is gone"
