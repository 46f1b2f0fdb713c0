"""n-grams that texts share with evaluation sets, against a loop over lists of words."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from data.prepare.ngrams import find_hits, make_table
from tests.data.prepare.test_words import as_array, expected

WORD = st.sampled_from(["a", "b", "It's", "its", "ÉTÉ", "ete", "—", "c,", "漢字"])
TEXT = st.lists(WORD, max_size=14).map(" ".join)


def as_set(*texts):
    """An evaluation set of one text an item."""
    return [
        pa.record_batch({"item": pa.array(range(len(texts)), pa.int64()), "text": as_array(texts)})
    ]


def windows(words, length):
    return [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]


def ngrams_of(texts, ngram, least):
    """The set of n-grams, as tuples of words, of an evaluation set."""
    found = set()
    for text in texts:
        words = expected(text)
        if len(words) >= ngram:
            found |= set(windows(words, ngram))
        elif len(words) >= least:
            found.add(tuple(words))
    return found


@given(
    st.lists(st.lists(TEXT, max_size=4), max_size=3),
    st.lists(TEXT, max_size=6),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_hits_are_those_of_a_loop(sets, texts, ngram, least):
    """Every occurrence, for every set, in order."""
    named = {f"set{index}": as_set(*own) for index, own in enumerate(sets)}
    table, counts = make_table(named, ngram, least)
    sought = [ngrams_of(own, ngram, min(least, ngram)) for own in sets]
    for (name, count), own, found in zip(counts.items(), sets, sought, strict=True):
        sizes = [len(expected(text)) for text in own]
        assert name in named
        assert count.ngrams == len(found)
        assert count.checked == sum(size >= min(least, ngram) for size in sizes)
    wanted = [
        (row, owner, window)
        for row, text in enumerate(texts)
        for length in range(1, ngram + 1)
        for window in windows(expected(text), length)
        for owner, own in enumerate(sought)
        if window in own
    ]
    hits = find_hits(table, as_array(texts))
    found = [
        (row, owner, tuple(expected(texts[row][begin:end])))
        for row, owner, begin, end in zip(*(each.tolist() for each in hits), strict=True)
    ]
    assert sorted(found) == sorted(wanted)
    assert hits.text.tolist() == sorted(hits.text.tolist())


@given(st.data())
def test_a_planted_ngram_is_found_where_it_is(data):
    """In other case and punctuation, at any place of a long text of other words."""
    sought = [f"w{index}" for index in range(13)]
    before = [f"x{index}" for index in range(data.draw(st.integers(0, 40)))]
    after = [f"y{index}" for index in range(data.draw(st.integers(0, 40)))]
    mark = st.sampled_from(["{}", '"{}"', "{},", "({})", "{}…", "“{}”"])
    planted = [data.draw(mark).format(word.upper()) for word in sought]
    gap = data.draw(st.sampled_from([" ", "\n", "\u00a0 ", " - "]))
    text = gap.join(before + planted + after)
    table, _ = make_table({"a": as_set(" ".join(sought))}, 13, 8)
    hits = find_hits(table, as_array(["", text, " ".join(sought[:12]), text]))
    assert hits.text.tolist() == [1, 3]
    assert expected(text[hits.start[0] : hits.end[0]]) == sought


def test_no_evaluation_text_is_long_enough():
    table, counts = make_table({"a": as_set("one two", "")}, 13, 8)
    assert counts["a"] == (0, 0)
    assert not len(find_hits(table, pa.array(["one two " * 20])).text)
