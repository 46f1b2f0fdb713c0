"""Counts documents and tokens of a source by bin of the document hash, without reading the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from data.read.unit import SCORE
from data.read.work_units import Unit, read_units
from data.select.document_hash import document_hash

BINS = 1 << 16

_BIN_SHIFT = np.uint64(48)


@dataclass(frozen=True, kw_only=True, eq=False)
class HashHistogram:
    """Counts of a part of a source by bin of the document hash."""

    seen: int  # documents of any score; the other counts are of those with the minimum score
    text_bytes: int  # uncompressed, of all documents
    tokens_by_bin: np.ndarray  # int64 [BINS]
    documents_by_bin: np.ndarray

    @property
    def documents(self) -> int:
        return int(self.documents_by_bin.sum())

    @property
    def tokens(self) -> int:
        return int(self.tokens_by_bin.sum())


def survey(
    units: Sequence[Unit], seed: int, min_score: float | None = None
) -> tuple[HashHistogram, np.ndarray]:
    """The counts of units, and uint64 [2, documents]: hash and `token_count` of each document.

    The text is read only if there are no token counts. Documents with a score below `min_score` are
    only in `seen` and `text_bytes`.
    """
    found = [np.empty((2, 0), np.uint64)]
    seen = 0
    for rows, batch in above_score(units, ("id", "token_count"), min_score):
        seen += rows
        counts = batch.column("token_count").to_numpy().astype(np.uint64)
        found.append(np.stack([document_hash(batch.column("id"), seed), counts]))
    documents = np.concatenate(found, axis=1)
    bins, counts = bins_of(documents[0]), documents[1].astype(np.int64)
    tokens_by_bin = np.zeros(BINS, np.int64)
    np.add.at(tokens_by_bin, bins, counts)
    histogram = HashHistogram(
        seen=seen,
        text_bytes=sum(unit.text_bytes for unit in units),
        tokens_by_bin=tokens_by_bin,
        documents_by_bin=np.bincount(bins, minlength=BINS),
    )
    return histogram, documents


def documents_in(documents: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """uint64 [2, documents]: the documents of a survey that are in `bins`."""
    wanted = np.zeros(BINS, bool)
    wanted[bins] = True
    return documents[:, wanted[bins_of(documents[0])]]


def merge(surveys: Iterable[HashHistogram]) -> HashHistogram:
    seen = text_bytes = 0
    bins = np.zeros((2, BINS), np.int64)
    for part in surveys:
        seen += part.seen
        text_bytes += part.text_bytes
        bins += (part.tokens_by_bin, part.documents_by_bin)
    tokens, documents = bins
    return HashHistogram(
        seen=seen, text_bytes=text_bytes, tokens_by_bin=tokens, documents_by_bin=documents
    )


def above_score(
    units: Iterable[Unit],
    columns: Sequence[str],
    min_score: float | None,
    tally: Counter[str] | None = None,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(number of rows, the rows with a score of `min_score` or more) of each batch of the units.

    A NaN score is below every minimum; `tally` is as in `read_unit`.
    """
    if min_score is None:
        for batch in read_units(units, columns, tally):
            yield batch.num_rows, batch
        return
    for batch in read_units(units, (*columns, SCORE), tally):
        enough = np.flatnonzero(batch.column(SCORE).to_numpy(zero_copy_only=False) >= min_score)
        yield batch.num_rows, batch.select(list(columns)).take(pa.array(enough))


def bins_of(hashes: np.ndarray) -> np.ndarray:
    """int64: the bin of each hash, its top 16 bits."""
    return (hashes >> _BIN_SHIFT).astype(np.int64)
