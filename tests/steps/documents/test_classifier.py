"""Training a classifier, scoring with it and with functions, through the engine."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from pipeline import InputError
from pipeline.errors import StepFailed
from pipeline.store import storage
from steps import sample
from steps.documents.classifier import Classifier, classifier, train_classifier
from steps.documents.score import score_documents
from tests.steps.built import built
from tests.steps.documents.test_sample import published, rows

SHARED = [f"word{index}" for index in range(200)]
GOOD, BAD = ["theorem", "proof", "because"], ["click", "buy", "now"]


def write(path, own, count, seed):
    """Documents of 30 words of all classes, and one of the class' own."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        words = [*rng.choice(SHARED, 30), *rng.choice(own, 2)]
        rng.shuffle(words)
        rows.append({"id": f"{path.name}-{number}", "text": " ".join(words)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def sources(tmp_path):
    """(good, bad) documents."""
    return write(tmp_path / "good.jsonl", GOOD, 300, 1), write(tmp_path / "bad.jsonl", BAD, 150, 2)


def trained(good, bad, **more):
    return train_classifier(good, bad, **{"bits": 12, "l2": 1e-4, **more})


def test_planted_classes_are_told_apart(tmp_path, sources):
    """On new documents, by scores that the histogram counts and that a sample uses."""
    node = trained(*sources)
    made = built(tmp_path / "store", node, Classifier)
    assert made.result["documents"] == {"good": 300, "bad": 150}
    assert 20 < made.result["held_out"] < 90
    assert min(made.result["accuracy"], made.result["auc"]) > 0.97
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    write(mixed / "g.jsonl", GOOD, 40, 3)
    write(mixed / "b.jsonl", BAD, 60, 4)
    scored = score_documents(str(mixed), node)
    found = published(tmp_path / "store", scored)
    scores = {row["id"]: row["score"] for row in rows(found)}
    right = [(score > 0.5) == name.startswith("g") for name, score in scores.items()]
    assert np.mean(right) > 0.95
    about = found.result["scores"]
    values = np.array(list(scores.values()))
    assert about["counts"] == np.histogram(values, np.linspace(0, 1, 21))[0].tolist()
    assert (about["column"], sum(about["counts"])) == ("score", 100)
    assert [about["min"], about["max"]] == [values.min(), values.max()]
    assert about["mean"] == pytest.approx(values.mean())
    kept = published(tmp_path / "store", sample(scored, tokens=-1, min_score=0.5))
    assert {row["id"] for row in rows(kept)} == {n for n, score in scores.items() if score >= 0.5}


def test_a_classifier_is_given_as_a_file(tmp_path, sources):
    """With the same bytes and the same scores."""
    good, bad = sources
    first = built(tmp_path / "store", trained(good, bad), Classifier)
    path = tmp_path / "mine.safetensors"
    path.write_bytes(storage.read_bytes(first.file))
    again = built(tmp_path / "other", classifier(str(path)), Classifier)
    assert storage.read_bytes(again.file) == path.read_bytes()
    assert again.result["buckets"] == 1 << 12
    scored = [
        published(tmp_path / "store", score_documents(good, node))
        for node in (trained(good, bad), classifier(str(path)))
    ]
    assert rows(scored[0]) == rows(scored[1])
    path.write_bytes(b"no classifier")
    with pytest.raises(StepFailed, match="expected a text classifier"):
        built(tmp_path / "other", classifier(str(path)), Classifier)


TRAIN = """
import sys
from tests.steps.documents.test_classifier import *
store, good, bad = sys.argv[1:]
made = built(store, train_classifier(good, bad, l2=1e-6), Classifier)
print(made.manifest.shard("classifier").files[0].sha256)
"""


@pytest.mark.slow
def test_the_bytes_do_not_depend_on_threads(tmp_path, sources):
    """BLAS adds in another order with two threads; the classifier does not."""
    found = set()
    for threads in ("1", "2"):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        command = [sys.executable, "-c", TRAIN, str(tmp_path / threads), *sources]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.add(ran.stdout.strip().splitlines()[-1])
    assert len(found) == 1


def length(document, per=1):
    return len(document["text"]) / per


def test_a_function_scores_documents(tmp_path, sources):
    by = functools.partial(length, per=10)
    node = score_documents(sources[1], by, column="length", bins=(0.0, 20.0, 21.0))
    made = published(tmp_path / "store", node)
    values = [row["length"] for row in rows(made)]
    assert values == [len(row["text"]) / 10 for row in rows(made)]
    about = made.result["scores"]
    assert about["above"] == sum(value > 21 for value in values) > 0
    assert about["counts"] == [sum(v < 20 for v in values), sum(20 <= v <= 21 for v in values)]
    assert about["below"] == 0
    kept = sample(node, tokens=-1, min_score=21.0, score="length")
    assert sorted(row["length"] for row in rows(published(tmp_path / "store", kept))) == sorted(
        value for value in values if value >= 21
    )


def nothing(document):
    return None


def not_a_number(document):
    return float("nan") if document["id"].endswith("7") else 1.0


def failing(document):
    return 1 / 0


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (
            nothing,
            "bad.jsonl-0.*nothing failed.*expected a finite number to be returned, found nothing",
        ),
        (not_a_number, "bad.jsonl-7.*expected a finite number to be returned, found nan"),
        (failing, "failing failed with ZeroDivisionError"),
    ],
)
def test_a_function_that_gives_no_number_is_named(tmp_path, sources, by, said):
    with pytest.raises(StepFailed, match=said):
        published(tmp_path / "store", score_documents(sources[1], by))


def test_failures_can_be_skipped(tmp_path, sources):
    made = published(tmp_path / "s", score_documents(sources[1], not_a_number, skip_failed=True))
    assert sum(made.result["dropped"].values()) == 15
    assert sum(made.result["scores"]["counts"]) == 135


def test_what_cannot_work_is_refused_when_it_is_declared(tmp_path, sources):
    for wrong in ("file.safetensors", None, int):
        with pytest.raises(InputError, match="by"):
            score_documents(sources[0], wrong)
    with pytest.raises(InputError, match="column"):
        score_documents(sources[0], length, column="text")
    with pytest.raises(InputError, match="bins"):
        score_documents(sources[0], length, bins=(1.0, 0.0))
    refused = ({"bits": 40}, {"l2": 0.0}, {"held_out": 1.0}, {"most": 0}, {"ngrams": 0})
    for wrong in (*refused, {"ngrams": 9}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            train_classifier(*sources, **wrong)
    few = write(tmp_path / "few.jsonl", GOOD, 1, 0)
    with pytest.raises(StepFailed, match="expected good documents"):
        built(tmp_path / "store", train_classifier(few, sources[1]), Classifier)
