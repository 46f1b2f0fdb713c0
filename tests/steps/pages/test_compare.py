"""Two trained models on one page, as a step of a graph."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
from datetime import UTC, datetime

import pytest

from models.shape.config import TransformerConfig
from pipeline import Experiment, named
from pipeline.plan.lineage import lineage
from pipeline.store import storage
from pipeline.store.manifest import Manifest
from steps.artifacts import Checkpoint, Report
from steps.documents.sample import sample
from steps.pages.compare import compare, differences, record_named
from steps.pages.run_record import of_directory
from steps.tokens.sequences import block_shuffle
from steps.tokens.token_cache import tokenize
from steps.tokens.tokenizer import train_tokenizer
from steps.training.train import train
from tests.steps.mini import MINI
from tests.steps.test_main_job import published

report = importlib.import_module("steps.pages.report")  # of the package, the name is the step's


def ablation(rates: tuple[float, float] = (3e-3, 1e-2)) -> Report:
    """The mini run with two learning rates."""
    splits = (("validation", MINI.validation_tokens),)
    documents = sample(MINI.source, tokens=MINI.train_tokens, splits=splits)
    tokenizer = train_tokenizer(documents, vocab_size=MINI.model.vocab_size)
    sequences = block_shuffle(tokenize(documents, tokenizer), MINI.length)
    small, large = (dataclasses.replace(MINI.optimizer, learning_rate=rate) for rate in rates)
    models = (
        train(sequences, MINI.model, small, MINI.training),
        named(train(sequences, MINI.model, large, MINI.training), "train_large"),
    )
    return compare(models, names=("small rate", "large rate"))


def check_report(prefix: str, path: str, manifest: Manifest) -> None:
    """A report needs neither scores nor text; its head has the run's facts, and its links work."""
    directory = storage.join(prefix, "report-x/attempts/1/shards/page")
    text = report.render(Checkpoint(path, manifest), None, None, lineage([path]), directory)
    parameters = TransformerConfig.from_plain(manifest.result["model"]).parameter_count
    model, commit = MINI.model, manifest.provenance["git"]["commit"]
    for fact in (
        datetime.fromtimestamp(manifest.started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        f"{parameters:,} parameters",
        f"{model.layers} layers of {model.embed}, MLP {model.mlp}",
        f"{model.heads} heads ({model.kv_heads} for keys) of {model.head_size}",
        f"batch {MINI.training.batch_size} x {MINI.length} tokens",
        f"commit {commit[:12]}",
    ):
        assert f"<span>{fact}</span>" in text[: text.index("</header>")]
    key = f'<th scope="row">key</th><td class="text">{manifest.key}</td></tr>\n</table>'
    assert key in text
    assert manifest.key[:8] in text[text.index("<title>") : text.index("</title>")]
    links = re.findall(r'href="(\.\./[^"]*)"', text)
    assert len(links) == 2
    for link in links:
        assert os.path.isfile(os.path.normpath(f"{directory}/{link}")), link


@pytest.mark.slow
def test_two_learning_rates_side_by_side(tmp_path):
    """The page has both names, the one setting that differs, and where the time of each went."""
    made = Experiment(ablation).run(prefix=str(tmp_path), executor="inline")
    assert made.manifest.label == "compare"
    path, manifest = published(str(tmp_path))["compare"]
    text = storage.read_bytes(storage.join(path, manifest.shard("page").root, "index.html"))
    page = text.decode()
    assert "<td>optimizer.learning_rate</td><td>0.003</td><td>0.01</td>" in page
    assert page.count("<td>optimizer.") == 1
    trained, model = published(str(tmp_path))["train"]
    attempt = storage.join(trained, "attempts", model.attempt)
    assert manifest.result["headline"] == ["compared small rate, large rate"]
    both = [of_directory(attempt, "lines"), record_named(f"manifest={trained}")]
    assert differences(both) == [["setting", "lines", "manifest"]]
    assert [row["loss"] for row in both[0].history] == [row["loss"] for row in both[1].history]
    check_report(str(tmp_path), trained, model)
    for word in ("small rate", "large rate", "Loss on validation", "% of the wall time"):
        assert word in page
