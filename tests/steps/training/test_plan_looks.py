"""What `plan` sees in data and outputs that exist, before anything runs."""

from __future__ import annotations

import dataclasses
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import steps
from pipeline import Experiment
from pipeline.errors import InputError, StepFailed
from pipeline.graph.facts import Published
from pipeline.graph.order import topological
from pipeline.graph.step import as_node
from pipeline.plan.facts import state
from pipeline.plan.state import read_state
from pipeline.store.outputs import Store
from steps.checkpoints.finished import EVERY
from steps.training.plan.declared_run import declared_run
from tests.pipeline.helpers import bring_up
from tests.steps.exchange.test_hf_chain import tokens_of
from tests.steps.mini import MINI


def refusal(store, wanted):
    """Why `plan` says that a run would refuse the last step of a graph; empty if it would not."""
    node = as_node(wanted)
    seen = read_state(topological([node]), Store(store))
    return state([node], Published(seen.found, store))[node.key].refusal


@pytest.mark.parametrize(
    ("text", "arguments", "line"),
    [
        ('{"body": "a"}\n', {}, "expected the key 'text' for the text, found body; pass text="),
        ('{"text": "a"}\n{"text": null}\n', {}, "byte 14: expected a value in 'text', found null"),
        ('{"text": "a"}\n{"text": "b', {}, "the line at byte 14: expected a JSON object"),
        ('{"text": "a"}\n', {"min_score": 0.5}, "has no column of numbers to read as a score"),
        ('{"body": "a"}\n{"body": null}\n', {"text": "body", "skip_nulls": True}, ""),
        ('{"text": "a"}\n' * 9, {"tokens": 10**6}, "train: 1,000,000 tokens asked, about 1"),
        (
            '{"text": "a"}\n' * 9,
            {"tokens": 9, "splits": (("validation", 10**6),)},
            "train: 9 tokens asked, about 0 available after the other splits",
        ),
        ('{"text": "a"}\n' * 9, {"tokens": 100}, ""),  # fewer than the file has bytes
    ],
)
def test_the_first_documents_of_a_local_source_are_read(tmp_path, text, arguments, line):
    """In the words of a run, which is refused by them before its first step."""
    file = tmp_path / "mine.jsonl"
    file.write_text(text)

    def graph(source: str = str(file)) -> steps.Documents:
        return steps.sample(source, **{"tokens": -1, **arguments})

    store = str(tmp_path / "store")
    found = refusal(store, graph())
    assert (line in found) if line else not found
    if line:
        with pytest.raises(InputError) as error:
            Experiment(graph).run(prefix=store, executor="inline")
        assert str(error.value) == f"sample: {found}"
        assert not list((tmp_path / "store").glob("sample-*"))


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "packed.arrow"])
def test_a_budget_that_repeated_texts_have_is_not_refused(tmp_path, name):
    """A file has them once, in a dictionary or in compressed buffers."""
    table = pa.table({"text": pa.array(["the same words each time"] * 500)})
    if name == "x.arrow":
        table = table.set_column(0, "text", table["text"].dictionary_encode())
    if name == "x.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        packed = pa.ipc.IpcWriteOptions(compression="zstd" if name.startswith("packed") else None)
        with pa.ipc.new_file(str(tmp_path / name), table.schema, options=packed) as out:
            out.write_table(table)
    tokens = 3_000  # of 6 a text
    assert (tmp_path / name).stat().st_size < tokens
    node = steps.sample(str(tmp_path / name), tokens=tokens)
    assert not refusal(str(tmp_path / "store"), node)
    bring_up(str(tmp_path / "store"), node)


def test_every_file_of_a_source_is_looked_into(tmp_path):
    """The last of three has another column; of many files some are opened."""
    for number in range(3):
        key = "text" if number < 2 else "body"
        (tmp_path / f"{number}.jsonl").write_text(f'{{"{key}": "a"}}\n')
    wanted = steps.sample(str(tmp_path), tokens=-1)
    found = refusal(str(tmp_path / "s"), wanted)
    assert f"{tmp_path}/2.jsonl: the line at byte 0: expected the key 'text'" in found


@pytest.mark.slow
def test_a_step_without_a_checkpoint_is_refused_where_the_run_is_finished(trained):
    """As the run refuses it; before there is a run, its declared intervals tell."""
    store = trained.rpartition("/")[0]
    _, sequences = tokens_of(store)
    model = steps.train(
        sequences, MINI.model, MINI.optimizer, MINI.training, epochs=1, sample_prompts=("The",)
    )
    longer = dataclasses.replace(MINI.training, steps=12)

    def extended(at):
        return steps.extend(model, sequences, optimizer=MINI.optimizer, train=longer, at=at)

    found = refusal(store, extended(7))
    assert found == f"{trained}: no checkpoint of step 7; there are [4, 8]"
    with pytest.raises(StepFailed) as error:
        bring_up(store, extended(7))
    assert found in str(error.value)
    assert refusal(store, steps.export_hf(model, at=7)) == found
    assert not refusal(store, extended(4))
    assert "no checkpoint of step 7 will be kept" in refusal(f"{store}-empty", extended(7))
    other = steps.block_shuffle(tokens_of(store)[0], MINI.length, seed=5)
    bring_up(store, other)
    more = {"optimizer": MINI.optimizer, "train": longer}
    assert "these sequences are" in refusal(store, steps.extend(model, other, **more))
    assert not refusal(store, steps.extend(model, sequences, **more))


@pytest.mark.parametrize(
    ("first", "at", "kept"),
    [
        ({}, 6, False),
        ({"checkpoint_every": 2}, 6, False),
        ({"keep_every": 3}, 6, True),
        ({"keep_every": 4}, 6, False),
        ({"milestones": (6,)}, 6, True),
        ({"milestones": (6, 40)}, 40, False),
        ({}, 12, True),
        ({}, 13, False),
    ],
)
def test_a_step_that_no_run_will_keep_is_refused_before_it_trains(tmp_path, first, at, kept):
    """By the declared intervals of the run; checkpoints to resume from are deleted."""
    sequences = steps.block_shuffle(tokens_of(str(tmp_path))[0], 16)
    short = dataclasses.replace(MINI.training, steps=12, milestones=(), keep_every=0)
    short = dataclasses.replace(short, **first)
    longer = dataclasses.replace(short, steps=60)
    model = steps.train(sequences, MINI.model, MINI.optimizer, short)
    more = {"optimizer": MINI.optimizer, "train": longer, "at": at}
    found = refusal(str(tmp_path), steps.extend(model, sequences, **more))
    assert (f"no checkpoint of step {at} will be kept" in found) != kept
    exported = refusal(str(tmp_path), steps.export_hf(model, at=at))
    assert (f"no checkpoint of step {at} will be kept" in exported) != kept


def test_the_steps_of_a_training_follow_from_a_token_cache_that_is_built():
    """About; exactly once the sequences are there, and from the budget before there is a cache."""
    documents = steps.sample(MINI.source, tokens=-1, splits=(("validation", 8_000),))
    tokens = steps.tokenize(documents, steps.byte_tokenizer())
    sequences = steps.block_shuffle(tokens, MINI.length)
    training = dataclasses.replace(MINI.training, steps=0)
    model = dataclasses.replace(MINI.model, vocab_size=257)
    node = as_node(steps.train(sequences, model, MINI.optimizer, training, epochs=2))
    batch = training.batch_size
    assert declared_run(node, {}).steps is None
    counted = {as_node(tokens).key: {"splits": {"train": {"tokens": 10 * MINI.length * batch}}}}
    run = declared_run(node, counted)
    assert (run.steps, run.exact) == (20, False)
    exact = {**counted, as_node(sequences).key: {"sequences": 9 * batch}}
    assert declared_run(node, exact).steps == 18


@pytest.mark.slow
def test_what_is_done_here_is_counted(trained, tmp_path):
    """The speed of a run on this machine predicts the next; an interrupted one is planned from its
    last checkpoint, another build of the same step is not."""
    store, (shared, _, own) = str(tmp_path / "store"), trained.rpartition("/")
    others = [name for name in os.listdir(shared) if name.startswith(EVERY) and name != own]
    shutil.copytree(shared, store, ignore=shutil.ignore_patterns(*others))
    _, sequences = tokens_of(store)

    def facts(training):
        arguments = {"epochs": 1, "sample_prompts": ("The",)}
        model = steps.train(sequences, MINI.model, MINI.optimizer, training, **arguments)
        node = as_node(model)
        seen = read_state(topological([node]), Store(store))
        return node, state([node], Published(seen.found, store))[node.key]

    longer = dataclasses.replace(MINI.training, steps=80)
    _, found = facts(longer)
    assert found.data["predicted"]["learned"]["runs"] == 1
    assert found.data["steps_done"] == 0
    node, found = facts(MINI.training)
    os.remove(f"{store}/{node.directory}/manifest.json")
    node, found = facts(MINI.training)
    assert found.data["steps_done"] == MINI.training.steps
    assert not found.data["tokens"]
    shutil.rmtree(f"{store}/{node.directory}/ledger")
    assert facts(MINI.training)[1].data["steps_done"] == 0
