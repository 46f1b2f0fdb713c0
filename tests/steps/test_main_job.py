"""The whole road: documents to a report, run, run again, changed."""

from __future__ import annotations

import dataclasses
import os
import re
from datetime import UTC, datetime

import numpy as np
import pytest

from models.shape.config import TransformerConfig
from pipeline.execute.logs import processes
from pipeline.store import storage
from pipeline.store.append import Tail
from pipeline.store.manifest import Manifest, load
from steps.artifacts import Checkpoint
from tests.pipeline.helpers import check_invariants
from tests.steps.mini import MINI, run

pytestmark = pytest.mark.slow  # the first of them runs the whole job


def published(store: str) -> dict[str, tuple[str, Manifest]]:
    """(path, manifest) of every output in a store, by display name."""
    found = {}
    for name in storage.list_names(store):
        path = storage.join(store, name)
        manifest = load(path)
        if manifest is not None:
            found[manifest.label] = (path, manifest)
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store in which the main job has run once."""
    directory = str(tmp_path_factory.mktemp("store"))
    assert run(directory) == 0
    return directory


def test_every_step_is_published_and_verifies(store):
    """Eight outputs whose files have the digests their manifests say."""
    assert check_invariants(store) == 8
    assert set(published(store)) == {
        *("sample", "train_tokenizer", "tokenize", "block_shuffle"),
        *("train", "evaluate", "generate", "report"),
    }


def test_running_again_executes_nothing(store, capsys):
    """All steps are reused, and the headline is printed all the same."""
    assert run(store) == 0
    out = capsys.readouterr().out
    assert "all 8 steps up to date" in out
    assert re.search(r"validation loss \d\.\d+ -> \d\.\d+ nats", out)
    assert "report: " in out


def test_a_change_reruns_what_depends_on_it_and_nothing_else(store, capsys):
    """More prompts: only the text and the report; the plan says so before."""
    changed = dataclasses.replace(MINI, prompts=("Return",))
    assert run(store, "plan", settings=changed) == 0
    planned = capsys.readouterr().out
    assert "prompts" in planned
    assert "2 of 8 steps would run" in planned
    assert run(store, settings=changed) == 0
    assert "2 steps executed, 6 reused" in capsys.readouterr().out


def test_the_loss_falls_and_every_step_has_a_row(store):
    """Eight rows in order, evaluations at 0, 4 and 8, and the loss below its start."""
    path, manifest = published(store)["train"]
    checkpoint = Checkpoint(path, manifest)
    assert [row["step"] for row in checkpoint.rows("history")] == list(range(1, 9))
    evaluations = checkpoint.rows("evaluations")
    assert [row["step"] for row in evaluations] == [0, 4, 8]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    np.testing.assert_allclose(evaluations[0]["loss"], np.log(512), rtol=0.05)
    assert manifest.result["measured"]["compilations"] == 1


def test_the_report_has_what_people_look_at(store):
    """Charts, the graph with every step, the sample, the configuration; nothing fetched.

    Its head has the facts of the run and of the model, and links that lead somewhere.
    """
    path, manifest = published(store)["report"]
    directory = storage.join(path, manifest.shard("page").root)
    page = storage.read_bytes(storage.join(directory, "index.html")).decode()
    _, trained = published(store)["train"]
    started = datetime.fromtimestamp(trained.started, UTC)
    parameters = TransformerConfig.from_plain(trained.result["model"]).parameter_count
    model = MINI.model
    for fact in (
        started.strftime("%Y-%m-%d %H:%M:%S UTC"),
        f"{parameters:,} parameters",
        f"{model.layers} layers of {model.embed}, MLP {model.mlp}",
        f"{model.heads} heads ({model.kv_heads} for keys) of {model.head_size}",
        f"batch {MINI.training.batch_size} x {MINI.length} tokens",
        f"commit {trained.provenance['git']['commit'][:12]}",
    ):
        assert f"<span>{fact}</span>" in page[: page.index("</header>")]
    links = re.findall(r'href="(\.\./[^"]*)"', page)
    assert len(links) == 2
    for link in links:
        assert os.path.isfile(os.path.normpath(f"{directory}/{link}")), link
    for label in ("sample", "tokenize", "block_shuffle", "train", "evaluate", "generate"):
        assert f'class="name">{label}<' in page
    assert page.count("<svg") == 8
    assert "unigram entropy" in page
    assert "learning_rate" in page
    assert not re.search(r'(src|href)="http', page)


def test_the_log_of_a_training_has_its_loss(store):
    """At the first step that is reported and at the last, and between them now and then."""
    attempts = storage.join(published(store)["train"][0], "attempts")
    (attempt,) = storage.list_names(attempts)
    text = b"".join(Tail(url).more() for url in processes(storage.join(attempts, attempt)))
    lines = [line for line in text.decode().splitlines() if ": loss " in line]
    assert "step 8 of 8: loss " in lines[-1], text.decode()
    assert len(lines) >= 2
