"""Which texts share n-grams of words with evaluation sets, by hashes of 64 bits.

An n-gram of a text that is none of an evaluation set counts as one with a probability of
(n-grams of the sets) / 2^64.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from data.prepare.words import Words, batches_of_words, mixed

_BASE = np.uint64(0xD1342543DE82EF95)  # odd; a window's hash is a polynomial in it
_MOST_FILTER = 26  # bits of an index into the filter: 64 MiB


Item = list[str]
"""The texts of one item of an evaluation set, such as a question with each of its answers."""


class Counts(NamedTuple):
    """An evaluation set in a table."""

    checked: int  # items with a text of enough words to be compared
    ngrams: int  # distinct ones


@dataclass(frozen=True)
class Table:
    """The n-grams of evaluation sets."""

    lengths: tuple[int, ...]  # words of an n-gram: n, and fewer of those that are whole texts
    hashes: np.ndarray  # uint64 [entries], ascending; one for each set that has the n-gram
    owners: np.ndarray  # int32 [entries], the index of the set

    @functools.cached_property
    def _filter(self) -> np.ndarray:
        """bool [2^bits]: whether an entry has these low bits; about one in 16 is true."""
        bits = min(_MOST_FILTER, max(16, (16 * len(self.hashes)).bit_length()))
        found = np.zeros(1 << bits, bool)
        found[self.hashes & np.uint64(len(found) - 1)] = True
        return found

    def rows(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(indices of hashes, of entries) of every pair that is equal, in the hashes' order."""
        some = np.flatnonzero(self._filter[hashes & np.uint64(len(self._filter) - 1)])
        begin = np.searchsorted(self.hashes, hashes[some], side="left")
        count = np.searchsorted(self.hashes, hashes[some], side="right") - begin
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return np.repeat(some, count), np.repeat(begin, count) + within


class Hits(NamedTuple):
    """n-grams of texts that a table has, by text and place; one for each set that has it."""

    text: np.ndarray  # int64 [hits], index of the text
    owner: np.ndarray  # int32 [hits], index of the evaluation set
    start: np.ndarray  # int64 [hits], the n-gram's first character in its text
    end: np.ndarray  # int64 [hits], the character behind it


def ngram_hashes(
    words: Words, lengths: Sequence[int]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(length, uint64 hashes, indices of their first words) of all n-grams inside the texts.

    `lengths` are at least 1 and ascending.
    """
    total = words.hashes.copy()
    for length in range(1, lengths[-1] + 1):
        if length > 1:
            total = total[:-1] * _BASE + words.hashes[length - 1 :]
        if length in lengths:
            first = np.flatnonzero(words.text[: len(total)] == words.text[length - 1 :])
            yield length, total[first] + mixed(np.array([length], np.uint64)), first


def make_table(
    sets: Mapping[str, Iterable[pa.RecordBatch]], ngram: int, least: int
) -> tuple[Table, dict[str, Counts]]:
    """The n-grams of evaluation sets, with counts by set.

    A set is batches of `item` (int64, index of the item) and `text` (string). A text of fewer than
    `ngram` words, but at least `least`, is an n-gram as a whole.
    """
    lengths = range(min(least, ngram), ngram + 1)
    hashes, owners = [np.zeros(0, np.uint64)], [np.zeros(0, np.int32)]
    used, counts = {ngram}, dict[str, Counts]()
    for owner, (name, batches) in enumerate(sets.items()):
        own, checked = [np.zeros(0, np.uint64)], set[int]()
        for batch in batches:
            item = batch.column("item").to_numpy()
            for begin, _, words in batches_of_words(batch.column("text")):
                size = np.bincount(words.text)
                long = np.flatnonzero(size >= lengths[0]) + begin
                checked.update(item[long].tolist())
                for length, found, at in ngram_hashes(words, lengths):
                    kept = found if length == ngram else found[size[words.text[at]] == length]
                    own.append(kept)
                    used |= {length} if len(kept) else set()
        distinct = np.unique(np.concatenate(own))
        hashes.append(distinct)
        owners.append(np.full(len(distinct), owner, np.int32))
        counts[name] = Counts(len(checked), len(distinct))
    joined = np.concatenate(hashes)
    order = np.argsort(joined, kind="stable")
    table = Table(tuple(sorted(used)), joined[order], np.concatenate(owners)[order])
    return table, counts


def find_hits(table: Table, texts: pa.Array) -> Hits:
    """The n-grams of texts, a string array without nulls, that the table has."""
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int32), *[np.zeros(0, np.int64)] * 2)]
    for begin, _, words in batches_of_words(texts):
        for length, hashes, first in ngram_hashes(words, table.lengths):
            which, entries = table.rows(hashes)
            at = first[which]
            ends = words.end[at + length - 1]
            found.append((words.text[at] + begin, table.owners[entries], words.start[at], ends))
    text, owner, start, end = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.lexsort((owner, end, start, text))
    return Hits(text[order], owner[order], start[order], end[order])
