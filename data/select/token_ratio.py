"""Estimates the ratio of a tokenizer's tokens to the source's own count from a few documents.

The estimate is a ratio of sums, r = sum(y) / sum(x): y is the tokenizer's count without EOS, x the
source's count. Documents of one place in a source are similar, so the standard error is that of a
cluster sample (Cochran 1977, Sampling Techniques, 6.4 and 9A), from the variance between places and
not between documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike

from data.read.work_units import Unit
from data.select.document_hash import document_hash
from data.select.hash_histogram import above_score
from data.tokenizer.text_tokenizer import TextTokenizer

DOCUMENTS = 200  # most documents of a cluster


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Sums over tokenised documents of one place in the source."""

    documents: int
    counted: int  # the source's own counts, x
    tokens: int  # the tokenizer's counts without EOS, y
    squares: tuple[int, int, int]  # x*x, x*y and y*y


@dataclass(frozen=True, kw_only=True)
class TokenRatio:
    """The tokenizer's tokens as a linear function of the source's count; else the identity."""

    per_count: float = 1.0
    per_document: int = 0  # added to every document: 1 for EOS
    standard_error: float = 0.0  # of `per_count`
    residual: float = 0.0  # standard deviation of a document's tokens about the prediction
    documents: int = 0
    clusters: int = 0

    def predict(self, counted: ArrayLike, documents: ArrayLike) -> np.ndarray:
        """float64: predicted tokens, from sums of the source's counts over numbers of documents."""
        return np.asarray(counted) * self.per_count + np.asarray(documents) * self.per_document

    def error(self, counted: int, documents: int) -> float:
        """Standard error of a prediction, from the ratio and from independently drawn documents."""
        return math.hypot(self.standard_error * counted, self.residual * math.sqrt(documents))


def probe(
    units: Iterable[Unit],
    tokenizer: TextTokenizer,
    seed: int,
    min_score: float | None = None,
    most_bytes: int = 1 << 20,
) -> Cluster:
    """Tokenise up to 200 documents of the first of `units` that have any.

    Of the rows read, the ones with the smallest document hashes are chosen, up to about
    `most_bytes` of text but at least one, so a document's place in its file has no influence.
    """
    # The first rows of the first units that have any.
    found: list[pa.RecordBatch] = []
    rows = 0
    each = (above_score((unit,), ("id", "text", "token_count"), min_score) for unit in units)
    for _, batch in chain.from_iterable(each):
        found.append(batch.filter(batch.column("text").is_valid()))
        rows += found[-1].num_rows
        if rows >= DOCUMENTS:
            break
    if not rows:
        return Cluster(documents=0, counted=0, tokens=0, squares=(0, 0, 0))
    # Of them the smallest hashes, as many as the limit of bytes allows.
    table = pa.Table.from_batches(found)
    hashes = document_hash(table.column("id").combine_chunks(), seed)
    order = np.argsort(hashes, kind="stable")[:DOCUMENTS]
    sizes = pc.call_function("binary_length", [table.column("text")]).to_numpy()[order]
    few = max(1, int(np.searchsorted(np.cumsum(sizes, dtype=np.int64), most_bytes, side="right")))
    chosen = table.take(pa.array(np.sort(order[:few])))
    # Number of ids by the reference: they decide what a sample holds.
    texts = tokenizer.encode_documents(chosen["text"].chunks, tokenizer.checked("tokenizers"))
    lengths = np.concatenate([sizes for _, sizes in texts])
    lengths = lengths + (tokenizer.bos_id != tokenizer.eos_id)
    counts = chosen.column("token_count").to_numpy()
    return Cluster(
        documents=len(counts),
        counted=int(counts.sum()),
        tokens=int(lengths.sum()),
        squares=(int(counts @ counts), int(counts @ lengths), int(lengths @ lengths)),
    )


def estimate(clusters: Sequence[Cluster]) -> TokenRatio:
    """The ratio and its standard error; with one cluster, as if documents were independent."""
    found = [cluster for cluster in clusters if cluster.documents]
    counted = sum(cluster.counted for cluster in found)
    documents = sum(cluster.documents for cluster in found)
    if not counted:  # the source counts no tokens, so there is no ratio
        return TokenRatio(per_document=1, documents=documents, clusters=len(found))
    ratio = sum(cluster.tokens for cluster in found) / counted
    xx, xy, yy = (sum(cluster.squares[i] for cluster in found) for i in range(3))
    # sum((y - r x)^2) = yy - 2 r xy + r^2 xx; rounding may make it slightly negative.
    n, squared = documents, max(0.0, yy - 2 * ratio * xy + ratio * ratio * xx)
    residual = math.sqrt(squared / n)
    if len(found) > 1:
        n, squared = len(found), sum((c.tokens - ratio * c.counted) ** 2 for c in found)
    error = math.sqrt(squared * n / (n - 1)) / counted if n > 1 else 0.0
    return TokenRatio(
        per_count=ratio,
        per_document=1,
        standard_error=error,
        residual=residual,
        documents=documents,
        clusters=len(found),
    )
