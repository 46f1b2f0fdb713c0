"""Which documents are in the sample, decided by a hash of (seed, document id) alone.

A document's place is u = hash / 2^64, uniform in [0, 1). Train takes [0, p), validation takes
[1 - v, 1) and test [1 - v - t, 1 - v): a document is in at most one split, a larger train sample
contains the smaller one, and validation and test do not move when train grows. No order of files,
number of workers or position in a file has any influence.

The edges are whole bins of the hash's top 16 bits. A survey sums the token counts of every bin,
which reads ids and counts and no text; `thresholds` then takes the fewest bins that hold the tokens
asked for, so the sample exceeds its budget by less than one bin, 1/65,536 of the source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from data.parquet import Unit, read_unit
from data.table import TableWriter
from pipeline import storage
from pipeline.errors import InputError

BINS = 1 << 16
SPLITS = ("train", "validation", "test")
ALL_THAT_IS_LEFT = -1
EMPTY_TEXT = "empty text"
OUTSIDE = "outside the ranges"

_BIN_SHIFT = np.uint64(48)
_SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string()), ("token_count", pa.int64())])


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Tokens asked for in each split; `train=-1` asks for all that the others leave."""

    train: int
    validation: int
    test: int = 0

    def __post_init__(self) -> None:
        if self.train < 1 and self.train != ALL_THAT_IS_LEFT:
            raise InputError(
                f"Budget.train={self.train} tokens: expected at least 1, or -1 for all there is"
            )
        for name in ("validation", "test"):
            if getattr(self, name) < 0:
                raise InputError(
                    f"Budget.{name}={getattr(self, name)} tokens: expected 0 or more; "
                    f"use 0 for no {name} split"
                )


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """First bin and end bin of every split; disjoint by construction of `thresholds`."""

    train: tuple[int, int]
    validation: tuple[int, int]
    test: tuple[int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Survey:
    """What a part of a source holds, by bin of the document hash.

    Attributes:
        documents: number of documents.
        tokens: sum of their `token_count`.
        text_bytes: uncompressed bytes of the text column, by the files' footers.
        tokens_by_bin: int64[65536].
        documents_by_bin: int64[65536].
    """

    documents: int
    tokens: int
    text_bytes: int
    tokens_by_bin: np.ndarray
    documents_by_bin: np.ndarray


def document_hash(ids: list[str] | pa.Array, seed: int) -> np.ndarray:
    """Keyed BLAKE2b (RFC 7693) of each id in 64 bits, the same on every platform.

    Args:
        ids: document ids, none null.
        seed: any integer of 64 bits with sign.

    Returns:
        uint64 array, one hash per id.
    """
    if not -(1 << 63) <= seed < 1 << 63:
        raise InputError(f"seed={seed}: expected an integer of 64 bits; use a smaller one")
    key = seed.to_bytes(8, "little", signed=True)
    names = ids.to_pylist() if isinstance(ids, pa.Array) else ids
    digests = [
        hashlib.blake2b(name.encode("utf-8"), digest_size=8, key=key).digest() for name in names
    ]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def survey(unit: Unit, seed: int) -> Survey:
    """Count one unit's documents and tokens by bin, without reading text where it can be helped."""
    tokens = np.zeros(BINS, np.int64)
    documents = np.zeros(BINS, np.int64)
    for batch in read_unit(unit, ("id", "token_count")):
        bins = _bins(document_hash(batch.column("id"), seed))
        np.add.at(tokens, bins, batch.column("token_count").to_numpy())
        np.add.at(documents, bins, 1)
    return Survey(
        documents=int(documents.sum()),
        tokens=int(tokens.sum()),
        text_bytes=unit.text_bytes,
        tokens_by_bin=tokens,
        documents_by_bin=documents,
    )


def merge(surveys: Iterable[Survey]) -> Survey:
    """The survey of several parts together; no parts make an empty survey."""
    documents = tokens = text_bytes = 0
    tokens_by_bin = np.zeros(BINS, np.int64)
    documents_by_bin = np.zeros(BINS, np.int64)
    for part in surveys:
        documents += part.documents
        tokens += part.tokens
        text_bytes += part.text_bytes
        tokens_by_bin += part.tokens_by_bin
        documents_by_bin += part.documents_by_bin
    return Survey(
        documents=documents,
        tokens=tokens,
        text_bytes=text_bytes,
        tokens_by_bin=tokens_by_bin,
        documents_by_bin=documents_by_bin,
    )


def thresholds(survey: Survey, budget: Budget, tokens_per_count: float = 1.0) -> Ranges:
    """The bins of every split, so that each holds at least what was asked, by less than one bin.

    Args:
        survey: of the whole source.
        budget: tokens asked for.
        tokens_per_count: tokens of our tokenizer per unit of `token_count`.

    Raises:
        InputError: more is asked than there is; the message says for which split.
    """
    predicted = survey.tokens_by_bin * float(tokens_per_count)
    validation_begin = _take_last(predicted, BINS, budget.validation, "validation", budget)
    test_begin = _take_last(predicted, validation_begin, budget.test, "test", budget)
    if budget.train == ALL_THAT_IS_LEFT:
        train_end = test_begin
        if not survey.documents_by_bin[:train_end].any():
            raise InputError(_too_much("train", budget, 1, 0.0, predicted.sum()))
    else:
        cumulative = np.cumsum(predicted[:test_begin])
        train_end = int(np.searchsorted(cumulative, budget.train)) + 1
        if train_end > test_begin:
            available = float(cumulative[-1]) if test_begin else 0.0
            raise InputError(_too_much("train", budget, budget.train, available, predicted.sum()))
    return Ranges(
        train=(0, train_end),
        validation=(validation_begin, BINS),
        test=(test_begin, validation_begin),
    )


def select(hashes: np.ndarray, ranges: Ranges) -> np.ndarray:
    """The index in `SPLITS` of each document (int8), -1 for those in none."""
    bins = _bins(hashes)
    splits = np.full(bins.shape, -1, np.int8)
    for index, name in enumerate(SPLITS):
        begin, end = getattr(ranges, name)
        splits[(bins >= begin) & (bins < end)] = index
    return splits


def sample_unit(unit: Unit, ranges: Ranges, seed: int, directory: str) -> dict[str, dict[str, int]]:
    """Write the unit's sampled documents to `<directory>/<split>.parquet`, in source order.

    A document of white space alone is dropped. One record batch is in memory at a time.

    Returns:
        For each split with documents: `documents`, `tokens` (by `token_count`), `bytes` (UTF-8 of
        the text). Under `dropped`: documents by reason, `empty text` and `outside the ranges`.
    """
    dropped = {EMPTY_TEXT: 0, OUTSIDE: 0}
    counts: dict[str, dict[str, int]] = {}
    writers: dict[str, TableWriter] = {}
    with ExitStack() as stack:
        for batch in read_unit(unit, _SCHEMA.names):
            for name, kept in _by_split(batch, ranges, seed, dropped):
                if name not in writers:
                    url = storage.join(directory, f"{name}.parquet")
                    writers[name] = stack.enter_context(TableWriter(url, _SCHEMA))
                    counts[name] = {"documents": 0, "tokens": 0, "bytes": 0}
                writers[name].write(kept)
                counts[name]["documents"] += kept.num_rows
                counts[name]["tokens"] += int(kept.column("token_count").to_numpy().sum())
                counts[name]["bytes"] += sum(len(t.encode()) for t in kept["text"].to_pylist())
    return {**counts, "dropped": dropped}


def _by_split(
    batch: pa.RecordBatch, ranges: Ranges, seed: int, dropped: dict[str, int]
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The batch's rows of each split that has any; `dropped` counts the others."""
    splits = select(document_hash(batch.column("id"), seed), ranges)
    dropped[OUTSIDE] += int((splits < 0).sum())
    sampled = np.flatnonzero(splits >= 0)
    texts = batch.column("text").take(pa.array(sampled)).to_pylist()
    empty = sampled[[not text.strip() for text in texts]]
    dropped[EMPTY_TEXT] += len(empty)
    splits[empty] = -1
    for index, name in enumerate(SPLITS):
        rows = np.flatnonzero(splits == index)
        if len(rows):
            yield name, batch.take(pa.array(rows)).select(_SCHEMA.names)


def _bins(hashes: np.ndarray) -> np.ndarray:
    return (hashes >> _BIN_SHIFT).astype(np.int64)


def _take_last(predicted: np.ndarray, end: int, asked: int, name: str, budget: Budget) -> int:
    """The first of the fewest bins before `end` that hold `asked` tokens."""
    if asked == 0:
        return end
    held = np.cumsum(predicted[:end][::-1])
    bins = int(np.searchsorted(held, asked)) + 1
    if bins > end:
        available = float(held[-1]) if end else 0.0
        raise InputError(_too_much(name, budget, asked, available, predicted.sum()))
    return end - bins


def _too_much(name: str, budget: Budget, asked: int, available: float, total: float) -> str:
    return (
        f"{name}: {asked:,} tokens asked, about {available:,.0f} available after the other splits "
        f"(the source holds about {total:,.0f}; budget: train {budget.train:,}, "
        f"validation {budget.validation:,}, test {budget.test:,}); ask for less or add documents"
    )
