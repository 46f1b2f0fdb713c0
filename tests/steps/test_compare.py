"""Two trained models on one page, as a step of a graph."""

from __future__ import annotations

import dataclasses
import os
import re

import pytest

from experiments.run_200m import Settings
from models.config import TransformerConfig
from pipeline import named
from pipeline.cli import main
from pipeline.plan.lineage import lineage
from pipeline.store import storage
from pipeline.store.manifest import Manifest
from steps import report
from steps.artifacts import Checkpoint, Report
from steps.block_shuffle import block_shuffle
from steps.compare import _record, compare, differences
from steps.reporting.run_record import of_directory
from steps.sample import sample
from steps.tokenize_documents import tokenize
from steps.train import train
from steps.train_tokenizer import train_tokenizer
from tests.steps.mini import MINI
from tests.steps.test_main_job import published


def ablation(s: Settings) -> Report:
    """The mini run with two learning rates."""
    some = named(sample(s.source, tokens=s.tokenizer_tokens, seed=s.seed), "sample_some")
    tokenizer = train_tokenizer(some, vocab_size=s.model.vocab_size)
    held_out = (("validation", s.validation_tokens),)
    tokens = tokenize(sample(s.source, tokenizer, tokens=s.tokens, splits=held_out), tokenizer)
    sequences = block_shuffle(tokens, sequence_length=64, io_block_size=4, window_blocks=64)
    large = dataclasses.replace(s.optimizer, learning_rate=1e-2)
    models = (
        train(sequences, model=s.model, optimizer=s.optimizer, train=s.train),
        named(train(sequences, model=s.model, optimizer=large, train=s.train), "train_large"),
    )
    return compare(models, names=("small rate", "large rate"))


def check_report(prefix: str, path: str, manifest: Manifest) -> None:
    """A report needs neither scores nor text; its head is of the run, and its links work."""
    directory = storage.join(prefix, "report-x/attempts/1/shards/page")
    text = report.render(Checkpoint(path, manifest), None, None, lineage([path]), directory)
    parameters = TransformerConfig.from_plain(manifest.result["model"]).parameter_count
    assert f"<span>{parameters:,} parameters</span>" in text
    assert manifest.key[:8] in text[text.index("<title>") : text.index("</title>")]
    links = re.findall(r'href="(\.\./[^"]*)"', text)
    assert len(links) == 2
    for link in links:
        assert os.path.isfile(os.path.normpath(f"{directory}/{link}")), link


@pytest.mark.slow
def test_two_learning_rates_side_by_side(tmp_path):
    """The page has both names, the one setting that differs, and where the time of each went."""
    with pytest.raises(SystemExit) as stop:
        main(ablation, {"mini": MINI}, ["--prefix", str(tmp_path), "--executor", "inline"])
    assert not stop.value.code
    path, manifest = published(str(tmp_path))["compare"]
    text = storage.read_bytes(storage.join(path, manifest.shard("page").root, "index.html"))
    page = text.decode()
    assert "<td>optimizer.learning_rate</td><td>0.003</td><td>0.01</td>" in page
    assert page.count("<td>optimizer.") == 1
    trained, model = published(str(tmp_path))["train"]
    attempt = storage.join(trained, "attempts", model.attempt)
    assert "{output}/attempts/" in manifest.result["headline"][0]
    both = [of_directory(attempt, "lines"), _record(f"manifest={trained}")]
    assert differences(both) == [["setting", "lines", "manifest"]]
    assert [row["loss"] for row in both[0].history] == [row["loss"] for row in both[1].history]
    check_report(str(tmp_path), trained, model)
    for word in ("small rate", "large rate", "Loss on validation", "% of the wall time"):
        assert word in page
