"""A small classifier of texts: trained on good and bad documents, or given as a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from data.read.listing import absolute, list_source
from data.read.unit import Fields
from models.shape.validation import at_least
from pipeline import Artifact, External, InputError, Result, StepContext, step
from pipeline.store import storage
from steps.artifacts import TRAIN, Documents
from steps.documents.facts import source_license
from steps.documents.items import DocumentSource, document_items
from steps.gang import HUB

if TYPE_CHECKING:
    import pyarrow as pa

    from data.prepare.classifier import TextClassifier

_FILE = "weights.safetensors"
_MOST_BYTES = 1 << 31  # of a file


class Classifier(Artifact):
    """A linear classifier of texts over hashed n-grams, see `data/prepare/classifier.py`."""

    @property
    def file(self) -> str:
        """URL of weights.safetensors."""
        return storage.join(self.shard("classifier"), _FILE)

    def load(self) -> TextClassifier:
        """The classifier, ready to score texts."""
        from data.prepare.classifier import decode

        return decode(storage.read_bytes(self.file), self.file)


@step(output=Classifier, version=1, environment=HUB)
def classifier(run: StepContext, source: Annotated[str, External(list_source, absolute)]) -> Result:
    """The classifier in a file that `train_classifier` wrote.

    Args:
        source: path or URL of weights.safetensors.
    """
    from data.prepare.classifier import decode
    from data.read.byte_ranges import open_ranges

    with open_ranges(source) as file:
        content = file.read(_MOST_BYTES)
    found = decode(content, source)
    _write(run, content)
    size = {"buckets": len(found.weights), "ngrams": found.ngrams}
    return {**size, "headline": [f"classifier of {size['buckets']:,} buckets"]}


def _check(arguments: Mapping[str, Any]) -> None:
    from data.prepare.classifier import MOST_NGRAMS

    whole = {"most": 2, "ngrams": 1, "bits": 8}
    at_least("train_classifier", **{name: (arguments[name], low) for name, low in whole.items()})
    ranges = {
        "l2": (0.0, 1.0),
        "held_out": (0.0, 1.0),
        "bits": (7, 25),
        "ngrams": (0, MOST_NGRAMS + 1),
    }
    for name, (low, high) in ranges.items():
        if not low < arguments[name] < high:
            raise InputError(
                f"train_classifier({name}={arguments[name]!r}): expected a number above {low} and "
                f"below {high}"
            )


@step(output=Classifier, version=1, check=_check, facts=source_license, environment=HUB)
def train_classifier(
    run: StepContext,
    good: DocumentSource,
    bad: DocumentSource,
    *,
    most: int = 20_000,
    ngrams: int = 2,
    bits: int = 18,
    l2: float = 1e-5,
    held_out: float = 0.1,
    fields: Fields = Fields(),
) -> Result:
    """A classifier that tells good documents from bad ones, trained on a CPU.

    It is a logistic regression; both classes weigh the same, whatever their numbers. The accuracy
    and the area under the ROC curve in the result are of documents that it was not trained on.

    Args:
        good: documents with training documents as they should be, or a source.
        bad: others, such as a sample of all there is.
        most: documents of each class to read, the first ones; so sample them first. A document of
            500 words takes about 25 KB of memory.
        ngrams: words of the longest n-grams that are features, at most 8.
        bits: 2^bits buckets of n-grams, 8 to 24.
        l2: penalty of large weights.
        held_out: share of documents, by a hash of their ids, that measure it.
        fields: names of the sources' columns.
    """
    import numpy as np

    from data.prepare.classifier import TextClassifier, buckets_of, encode, feature_matrix
    from data.prepare.logistic import area_under_curve, minimise, objective
    from data.select.document_hash import document_hash

    rows, labels, tests = [], [], []
    for value, documents in ((True, good), (False, bad)):
        for batch in _first(documents, fields, most):
            rows += buckets_of(batch.column("text"), bits, ngrams)
            tests.append(document_hash(batch.column("id"), 0) < np.uint64(held_out * 2.0**64))
            labels.append(np.full(batch.num_rows, value))
            run.progress(len(rows), 2 * most, "documents")
    label, test = (np.concatenate([np.zeros(0, bool), *each]) for each in (labels, tests))
    for kind, part in (("training", ~test), ("held-out", test)):
        for value, name in ((True, "good"), (False, "bad")):
            if not (label[part] == value).any():
                raise InputError(
                    f"train_classifier: expected {name} documents for {kind}, found none among "
                    f"{int((label == value).sum()):,}; give more"
                )
    matrix = feature_matrix(rows, 1 << bits)
    fit = minimise(objective(matrix[~test], label[~test], l2), (1 << bits) + 1)
    made = TextClassifier(
        fit.weights[:-1].astype(np.float32), float(np.float32(fit.weights[-1])), ngrams
    )
    margin = matrix[test] @ made.weights.astype(np.float64) + made.bias
    accuracy = float(np.mean([np.mean((margin > 0)[label[test] == v] == v) for v in (True, False)]))
    auc = area_under_curve(margin, label[test])
    _write(run, encode(made))
    return {
        "buckets": 1 << bits,
        "ngrams": ngrams,
        "documents": {"good": int(label.sum()), "bad": int((~label).sum())},
        "held_out": int(test.sum()),
        "accuracy": accuracy,
        "auc": auc,
        "loss": fit.loss,
        "steps": fit.steps,
        "headline": [
            f"held-out accuracy {accuracy:.3f}, AUC {auc:.3f} of {test.sum():,} documents"
        ],
    }


def _write(run: StepContext, content: bytes) -> None:
    with run.shard("classifier") as directory:
        storage.write_atomic(storage.join(directory, _FILE), content)


def _first(documents: Documents | str, fields: Fields, most: int) -> Iterator[pa.RecordBatch]:
    """The first training documents."""
    from data.prepare.items import read_documents

    left = most
    for item in document_items(documents, fields).values():
        for split, batch in read_documents(item):
            if split == TRAIN:
                yield batch.slice(0, left)
                left -= min(left, batch.num_rows)
            if not left:
                return
