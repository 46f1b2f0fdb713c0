"""Rows are what cutting lists by hand gives, and reading one reads no more."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batches.sequences import SequenceReader, row_count
from data.cache.token_array import TokenArray
from pipeline.errors import InputError
from tests.data.token_shards import VOCAB, rows_of, write_shards


class Listed:
    """Tokens of shards in lists, all different; remembers what was asked for."""

    def __init__(self, sizes):
        numbers = iter(range(sum(sizes)))
        self.shards = [[next(numbers) for _ in range(size)] for size in sizes]
        self.joined = [token for shard in self.shards for token in shard]
        self.shard_ends = np.cumsum(np.array(sizes, np.int64))
        self.asked = []

    def read(self, starts, length, out=None):
        self.asked += [(start, length) for start in starts.tolist()]
        found = np.array([self.joined[start : start + length] for start in starts], np.int32)
        found = found.reshape(len(starts), length)
        if out is None:
            return found
        assert out.flags.c_contiguous
        assert out.shape == found.shape
        out[...] = found
        return out


sizes_of_shards = st.lists(st.integers(0, 40), min_size=1, max_size=8)
lengths = st.integers(1, 20)


@settings(max_examples=80, deadline=None)
@given(sizes=sizes_of_shards, length=lengths)
def test_rows_are_cut_by_hand(sizes, length):
    """Aligned rows in the shards' order, then the tails joined and cut; the count to match."""
    tokens = Listed(sizes)
    rows, expected = SequenceReader(tokens, length), rows_of(tokens.shards, length)
    assert rows.count == row_count(sizes, length) == len(expected) == sum(sizes) // length
    assert rows.read(np.arange(rows.count)).tolist() == expected


@settings(max_examples=80, deadline=None)
@given(data=st.data(), sizes=sizes_of_shards, length=lengths)
def test_what_is_read_is_what_is_used(data, sizes, length):
    """Any rows in any order: no read crosses the end of a shard, none reads a token unused."""
    tokens = Listed(sizes)
    rows = SequenceReader(tokens, length)
    wanted = data.draw(st.lists(st.integers(0, max(rows.count - 1, 0)), max_size=12))
    wanted = wanted if rows.count else []
    found = rows.read(np.array(wanted, np.int64))
    assert found.shape == (len(wanted), length)
    assert found.tolist() == [rows_of(tokens.shards, length)[row] for row in wanted]
    assert sum(size for _, size in tokens.asked) == len(wanted) * length
    for start, size in tokens.asked:
        shard = np.searchsorted(tokens.shard_ends, start, side="right")
        assert start + size <= tokens.shard_ends[shard]


@settings(max_examples=80, deadline=None)
@given(data=st.data(), sizes=sizes_of_shards, length=lengths)
def test_sources_are_numbered_through(data, sizes, length):
    """Each source has the rows it has alone; no row joins tails of two sources."""
    cut = data.draw(st.integers(0, len(sizes)))
    tokens = Listed(sizes)
    rows = SequenceReader(tokens, length, [cut, len(sizes) - cut])
    first, second = rows_of(tokens.shards[:cut], length), rows_of(tokens.shards[cut:], length)
    assert rows.counts == (len(first), len(second))
    assert rows.count == len(first) + len(second)
    assert rows.read(np.arange(rows.count)).tolist() == first + second


@pytest.mark.parametrize("length", [1, 100, 1024, 1500])
def test_rows_of_stored_shards(tmp_path, length):
    """The same from storage: shards of a chunk and less, of none, and of several."""
    shards, listed = write_shards(tmp_path, [1024, 0, 1, 5000, 700, 3, 2048])
    with TokenArray(shards, VOCAB) as tokens:
        rows = SequenceReader(tokens, length)
        assert rows.read(np.arange(rows.count)).tolist() == rows_of(listed, length)


def test_no_shards_hold_no_rows():
    """Nothing is nothing, and reading nothing is fine."""
    rows = SequenceReader(Listed([]), 5)
    assert rows.count == row_count([], 5) == 0
    assert rows.read(np.array([], np.int64)).shape == (0, 5)


@pytest.mark.parametrize("row", [-1, 3])
def test_rows_that_are_not_there_are_refused(row):
    """Fifteen tokens have the rows of five 0, 1 and 2."""
    with pytest.raises(IndexError, match=r"inside \[0, 3\)"):
        SequenceReader(Listed([9, 6]), 5).read(np.array([0, row]))


def test_a_length_below_one_is_refused():
    """Nothing can be cut into rows of no tokens."""
    with pytest.raises(InputError, match="sequence_length=0"):
        row_count([5], 0)
    with pytest.raises(InputError, match="sequence_length=-1"):
        SequenceReader(Listed([5]), -1)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), sizes=sizes_of_shards, length=lengths)
def test_pieces_are_where_the_tokens_are_and_back(data, sizes, length):
    """Pieces hold a row's tokens inside shards; a span of a shard is in the rows that show it."""
    cut = data.draw(st.integers(0, len(sizes)))
    sources = [cut, len(sizes) - cut]
    tokens = Listed(sizes)
    reader = SequenceReader(tokens, length, sources)
    parts = [tokens.shards[:cut], tokens.shards[cut:]]
    rows = [row for part in parts for row in rows_of(part, length)]
    for row, expected in enumerate(rows):
        pieces = reader.pieces(row)
        assert [t for start, size in pieces for t in range(start, start + size)] == expected
    shard = data.draw(st.sampled_from(range(len(sizes))))
    begin = data.draw(st.integers(0, sizes[shard]))
    end = data.draw(st.integers(begin, sizes[shard]))
    wanted = set(tokens.shards[shard][begin:end])
    found = reader.rows_with(shard, begin, end).tolist()
    assert found == [number for number, row in enumerate(rows) if wanted & set(row)]
