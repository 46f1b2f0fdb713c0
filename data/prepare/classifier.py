"""A linear classifier of texts: logistic regression over hashed n-grams of words.

A feature is whether the text has any n-gram of one bucket; a text's features have unit length. A
classifier is the file `weights.safetensors`, of `weights` (float32 [buckets]) and `bias` (float32
[1]), with the number of words of the longest n-grams in its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from data.prepare.ngrams import ngram_hashes
from data.prepare.words import batches_of_words
from pipeline.errors import InputError

_KEY = "ponente_text_classifier"
_MOST_BITS = 28
MOST_NGRAMS = 8
"""Most words of the n-grams of a classifier."""


class TextClassifier(NamedTuple):
    """The weights; `weights` is float32 [2^bits], `ngrams` are words of the longest n-grams."""

    weights: np.ndarray
    bias: float
    ngrams: int

    @property
    def bits(self) -> int:
        return len(self.weights).bit_length() - 1

    def score(self, texts: pa.Array) -> np.ndarray:
        """float64 [texts]: the probability that a text is a good one; no nulls."""
        from scipy.special import expit

        scores = []
        for text, bucket, count in features(texts, self.bits, self.ngrams):
            total = np.zeros(count)
            rows, first = np.unique(text, return_index=True)
            if len(rows):
                size = np.diff(first, append=len(text))
                weights = self.weights[bucket].astype(np.float64)
                total[rows] = np.add.reduceat(weights, first) / np.sqrt(size)
            scores.append(expit(total + self.bias))
        return np.concatenate(scores) if scores else np.zeros(0)


def features(
    texts: pa.Array, bits: int, ngrams: int
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """(int64 text, int64 bucket) of each feature that a text has, of neighbouring texts.

    The pairs are ascending and distinct, and the third is the number of these texts.
    """
    for begin, end, words in batches_of_words(texts):
        pairs = [
            (words.text[at].astype(np.uint64) << np.uint64(bits)) | (hashes >> np.uint64(64 - bits))
            for _, hashes, at in ngram_hashes(words, range(1, ngrams + 1))
        ]
        found = np.unique(np.concatenate(pairs)).astype(np.int64)
        yield found >> bits, found & ((1 << bits) - 1), end - begin


def buckets_of(texts: pa.Array, bits: int, ngrams: int) -> list[np.ndarray]:
    """int32 buckets of every text, ascending and distinct."""
    found: list[np.ndarray] = []
    for text, bucket, count in features(texts, bits, ngrams):
        ends = np.searchsorted(text, np.arange(1, count))
        found += np.split(bucket.astype(np.int32), ends)
    return found


def feature_matrix(rows: list[np.ndarray], buckets: int) -> Any:
    """csr_array [texts, buckets] of unit length, from the buckets of each text."""
    from scipy.sparse import csr_array

    sizes = np.array([len(row) for row in rows], np.int64)
    values = np.repeat(1.0 / np.sqrt(np.maximum(sizes, 1)), sizes)
    begins = np.concatenate([[0], np.cumsum(sizes)])
    return csr_array((values, np.concatenate(rows), begins), shape=(len(rows), buckets))


def encode(classifier: TextClassifier) -> bytes:
    """The file of a classifier; the same weights give the same bytes."""
    from safetensors.numpy import save

    tensors = {
        "weights": np.ascontiguousarray(classifier.weights, np.float32),
        "bias": np.array([classifier.bias], np.float32),
    }
    return save(tensors, {_KEY: json.dumps({"ngrams": classifier.ngrams})})


def decode(content: bytes, where: str) -> TextClassifier:
    """The classifier of a file's content; `InputError` if it is none."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        size = int.from_bytes(content[:8], "little")
        about = json.loads(content[8 : 8 + size])["__metadata__"][_KEY]
        ngrams = int(json.loads(about)["ngrams"])
        tensors = load(content)
        weights, (bias,) = tensors["weights"], tensors["bias"].tolist()
        found = TextClassifier(weights, bias, ngrams)
        if not (1 <= ngrams <= MOST_NGRAMS and weights.dtype == np.float32 and weights.ndim == 1):
            raise ValueError(f"{weights.dtype} {weights.shape} of {ngrams}-grams")
        if not (1 <= found.bits <= _MOST_BITS and len(weights) == 1 << found.bits):
            raise ValueError(f"{len(weights)} buckets")
        if not (np.isfinite(weights).all() and np.isfinite(bias)):
            raise ValueError("weights that are no numbers")
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InputError(
            f"{where}: expected a text classifier (weights.safetensors of train_classifier), found "
            f"another file ({type(error).__name__}: {error}); give the file of one"
        ) from error
    return found
