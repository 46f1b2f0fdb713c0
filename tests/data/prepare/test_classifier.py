"""Scores of texts against a loop over n-grams, and the file of a classifier."""

from __future__ import annotations

import json
import struct
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from data.prepare import words as words_module
from data.prepare.classifier import TextClassifier, decode, encode, features
from data.prepare.words import words
from pipeline.errors import InputError
from tests.data.prepare.test_words import as_array

TEXTS = st.lists(st.lists(st.sampled_from(["a", "b,", "C", "…"]), max_size=9).map(" ".join))
BITS = 6


def weights():
    return np.random.default_rng(0).normal(size=1 << BITS).astype(np.float32)


def buckets(text):
    """The buckets of a text by the hashes of its words, in Python's integers."""
    hashes = words(as_array([text])).hashes.tolist()
    mix = [int(_mixed(length)) for length in (1, 2)]
    single = [value + mix[0] for value in hashes]
    double = [a * 0xD1342543DE82EF95 + b + mix[1] for a, b in pairwise(hashes)]
    return sorted({(value % 2**64) >> (64 - BITS) for value in single + double})


def _mixed(value):
    """SplitMix64's output function."""
    z = (value + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@given(TEXTS, st.sampled_from([3, 1 << 19]))
def test_a_score_is_the_mean_of_a_texts_features(texts, at_once):
    classifier = TextClassifier(weights(), 0.25, 2)
    wanted = []
    for text in texts:
        own = buckets(text)
        total = sum(float(classifier.weights[bucket]) for bucket in own)
        wanted.append(1 / (1 + np.exp(-(total / max(1, len(own)) ** 0.5 + 0.25))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words_module, "_AT_ONCE", at_once)
        found = classifier.score(as_array(texts))
        pairs, first = [], 0
        for text, bucket, count in features(as_array(texts), BITS, 2):
            pairs += zip((text + first).tolist(), bucket.tolist(), strict=True)
            first += count
    assert found == pytest.approx(np.array(wanted))
    assert pairs == [(row, bucket) for row, text in enumerate(texts) for bucket in buckets(text)]


@given(TEXTS)
def test_a_score_does_not_depend_on_other_texts(texts):
    classifier = TextClassifier(weights(), 0.25, 2)
    alone = [classifier.score(as_array([text]))[0] for text in texts]
    assert classifier.score(as_array(texts)).tolist() == alone


def test_a_file_holds_a_classifier():
    classifier = TextClassifier(weights(), 0.25, 2)
    content = encode(classifier)
    assert encode(classifier) == content
    found = decode(content, "here")
    assert (found.weights == classifier.weights).all()
    assert found[1:] == (0.25, 2)
    assert encode(found) == content


def _with(about, **tensors):
    return save(tensors, {"ponente_text_classifier": json.dumps(about)})


W, B = weights(), np.zeros(1, np.float32)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"text",
        b"\x93NUMPY" + bytes(90),
        struct.pack("<Q", 1 << 40) + b"{}",
        save({"weights": W, "bias": B}),
        _with({}, weights=W, bias=B),
        _with({"ngrams": 0}, weights=W, bias=B),
        _with({"ngrams": 2}, weights=W),
        _with({"ngrams": 2}, weights=W[:33], bias=B),
        _with({"ngrams": 2}, weights=W.astype(np.float64), bias=B),
        _with({"ngrams": 2}, weights=W.reshape(2, -1), bias=B),
        _with({"ngrams": 2}, weights=W * np.float32("nan"), bias=B),
        _with({"ngrams": 2}, weights=W, bias=np.zeros(2, np.float32)),
        encode(TextClassifier(W, 0.0, 2))[:-1],
    ],
)
def test_another_file_is_refused_in_one_line(content):
    with pytest.raises(InputError, match="here: expected a text classifier") as refused:
        decode(content, "here")
    assert "\n" not in str(refused.value)


def test_no_text_has_a_score_of_its_own():
    classifier = TextClassifier(weights(), 0.25, 2)
    assert classifier.score(pa.array([], pa.string())).shape == (0,)
    assert classifier.score(as_array(["", "…"])) == pytest.approx(1 / (1 + np.exp(-0.25)))
