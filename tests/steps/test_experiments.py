"""The experiment files: their smoke presets run, and their full ones plan."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import steps
from data.read.parquet_table import read_table
from data.tokenizer import text_tokenizer as tokenizer_training
from experiments import learning_rate, run_200m, tomat_200m
from pipeline import Experiment
from pipeline.graph.order import topological
from pipeline.graph.step import StepSpec
from pipeline.store.manifest import load
from pipeline.store.storage import read_bytes
from steps import Checkpoint, Report, Scores
from tests.steps.mini import MINI


def page_runs(page: Report) -> list[Checkpoint]:
    """The runs that a page compares."""
    paths = [path for name, path in page.input_paths.items() if name.startswith("runs[")]
    return [Checkpoint(path, load(path)) for path in paths]


@pytest.mark.slow
def test_the_best_of_two_learning_rates_is_scored(tmp_path, capsys):
    """The page has both runs; what is scored is the model with the lower validation loss."""
    page, scores = learning_rate.experiment.run("smoke", prefix=str(tmp_path), executor="inline")
    assert isinstance(page, Report)
    assert isinstance(scores, Scores)
    text = read_bytes(page.page).decode()
    assert "train[0.001]" in text
    assert "train[0.01]" in text
    losses = [run.result["last"]["loss"] for run in page_runs(page)]
    assert len(losses) == 2
    winner = Checkpoint(scores.input_paths["checkpoint"], load(scores.input_paths["checkpoint"]))
    assert winner.result["last"]["loss"] == min(losses)
    assert winner.result["selected"]["mode"] == "min"
    latest = tmp_path / "reports" / "learning_rate-smoke" / "compare.html"
    assert os.path.relpath(page.page, latest.parent) in latest.read_text()
    assert str(latest) in capsys.readouterr().out


@pytest.mark.slow
def test_the_tokenizer_reads_no_validation_text(tmp_path, monkeypatch):
    """Of the smoke run's shape: what training a tokenizer reads is the training split's text."""
    read = []
    real = tokenizer_training.train

    def watched(texts, vocab_size, *more):
        kept = [list(batch) for batch in texts]
        read.extend(text for batch in kept for text in batch)
        return real(kept, vocab_size, *more)

    monkeypatch.setattr(tokenizer_training, "train", watched)
    documents, _ = small = Experiment(both).run(prefix=str(tmp_path), executor="inline")
    assert len(small) == 2
    held_out = {t for _, f in documents.files("validation") for t in texts(f)}
    trained = {t for _, f in documents.files("train") for t in texts(f)}
    assert held_out
    assert set(read) == trained
    assert not held_out & set(read)
    nodes = topological(run_200m.experiment.graph("smoke"))
    (sampled,) = {node.key for node in nodes if node.label == "sample"}
    (trainer,) = (node for node in nodes if node.label == "train_tokenizer")
    assert trainer.inputs["documents"].key == sampled


def both(tokens: int | None = None) -> tuple[steps.Documents, steps.Tokenizer]:
    """The first two steps of the 200M run, in miniature."""
    splits = (("validation", MINI.validation_tokens),)
    documents = steps.sample(MINI.source, tokens=MINI.train_tokens, splits=splits)
    return documents, steps.train_tokenizer(documents, vocab_size=300, tokens=tokens)


def texts(file: str) -> list[str]:
    """The texts of a sampled file."""
    return [t for batch in read_table(file, ("text",)) for t in batch.column("text").to_pylist()]


def test_the_library_has_every_step_and_artifact_by_name():
    """As `__init__.pyi` tells type checkers, whether or not the step's module was imported."""
    stub = ast.parse(Path(steps.__file__).with_suffix(".pyi").read_text())
    lines = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    named = {alias.name for line in lines for alias in line.names}
    assert named == set(steps.__all__)
    assert all(getattr(steps, name) is not None for name in named)
    for name in ("train", "evaluate", "report", "compare", "sample", "mix"):
        assert isinstance(getattr(steps, name), StepSpec)


@pytest.mark.slow
def test_integers_that_are_not_text_train_and_extend(tmp_path):
    """tomat's smoke preset: its loss is over the predicted ids, and there are no bits per byte."""
    report = tomat_200m.experiment.run("smoke", prefix=str(tmp_path), executor="inline")
    trained = Checkpoint(report.input_paths["checkpoint"], load(report.input_paths["checkpoint"]))
    table = pq.read_table(tomat_200m.TOY).to_pydict()
    masks = [mask[1:] for mask in table["loss_mask"]]
    split = trained.sequences.cache.result["splits"]
    assert split["train"]["rows"] == 512 - 64
    assert sum(part["predicted"] for part in split.values()) == sum(map(sum, masks))
    scores = Scores(report.input_paths["scores"], load(report.input_paths["scores"]))
    assert "bits_per_byte" not in scores.result
    assert scores.result["tokens"] == split["validation"]["predicted"]
    assert trained.result["last"]["step"] == 12
    assert trained.result["last"]["loss"] < trained.result["first"]["loss"]
    text = read_bytes(report.page).decode()
    assert "nats per token, whole held-out split" in text


@pytest.mark.parametrize(
    "name",
    ["tpuchat_130m", "nanopt_1b", "nanochat_16k", "recipes", "tomat_1b", "scaling_smoke"],
)
def test_every_preset_declares_a_graph(name):
    """Steps are checked against each other: vocabularies, lengths, splits, hardware."""
    experiment = importlib.import_module(f"experiments.{name}").experiment
    assert "smoke" in experiment.presets
    assert all(experiment.graph(preset) for preset in experiment.presets)
