"""Removing spans and documents, against a loop over characters."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from data.prepare.contamination import (
    CUT,
    SHORT,
    Cut,
    count_hits,
    cut_documents,
    drop_documents,
    pieces,
)
from data.prepare.ngrams import find_hits, make_table
from tests.data.prepare.test_ngrams import as_set
from tests.data.prepare.test_words import as_array

ALPHABET = st.text(st.sampled_from("ab, \n漢."), max_size=60)


def batch(texts, counts=None):
    return pa.record_batch(
        {
            "id": as_array([f"d{index}" for index in range(len(texts))]),
            "text": as_array(texts),
            "token_count": pa.array(counts or [10] * len(texts), pa.int64()),
            "url": as_array([f"u{index}" for index in range(len(texts))]),
        }
    )


@given(ALPHABET, st.data(), st.integers(0, 9))
def test_pieces_are_what_a_mask_of_characters_leaves(text, data, margin):
    """Characters of a span, of its margin, and of a word in which one ends, go."""
    place = st.integers(0, len(text))
    some = st.tuples(place, place).map(sorted).filter(lambda span: span[0] < span[1])
    spans = sorted(data.draw(st.lists(some, max_size=4))) if text else []
    words = [found.span() for found in re.finditer(r"漢|[ab](?:[ab,.]*[ab])?", text)]
    gone = np.zeros(len(text), bool)
    for begin, end in spans:
        low, high = max(0, begin - margin), min(len(text), end + margin)
        gone[low:high] = True
        for first, last in words:
            if first < low < last or first < high < last:
                gone[first:last] = True
    arrays = np.array(spans, np.int64).reshape(-1, 2).T
    found = pieces(text, *arrays, margin)
    wanted = "".join("\0" if lost else c for c, lost in zip(text, gone, strict=True)).split("\0")
    assert [text[begin:end] for begin, end in found] == [p.strip() for p in wanted if p.strip()]


def hit(texts, sought, ngram=3):
    table, _ = make_table({"a": as_set(sought)}, ngram, ngram)
    return table, find_hits(table, as_array(texts))


def test_a_document_becomes_its_pieces():
    texts = [
        "clean one",
        "left side one two three right side",
        "one two three",
        "one two three " * 5,
    ]
    table, hits = hit(texts, "one two three")
    left, dropped = cut_documents(batch(texts, [5, 34, 3, 15]), hits, Cut(0, 4, 2))
    assert dropped == {SHORT: [2, 3]}
    assert left.to_pylist() == [
        {"id": "d0", "text": "clean one", "token_count": 5, "url": "u0"},
        {"id": "d1/0", "text": "left side", "token_count": 9, "url": "u1"},
        {"id": "d1/1", "text": "right side", "token_count": 10, "url": "u1"},
    ]
    assert left.schema == batch(texts).schema
    apart = "a b c, one two three, d e f, one two three, g h i"
    table, hits = hit([apart], "one two three")
    assert cut_documents(batch([apart]), hits, Cut(0, 1, 2))[1] == {CUT: [0]}
    assert cut_documents(batch([apart]), hits, Cut(0, 1, 3))[0].num_rows == 3
    assert not len(
        find_hits(table, cut_documents(batch([apart]), hits, Cut(0, 1, 3))[0]["text"]).text
    )


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=12).map(" ".join), max_size=5))
def test_nothing_is_found_in_what_is_left(texts):
    table, hits = hit(texts, "a b c a b", 3)
    left, _ = cut_documents(batch(texts), hits, Cut(0, 1, 9))
    assert not len(find_hits(table, left["text"]).text)
    clean = {f"d{row}": text for row, text in enumerate(texts) if row not in hits.text}
    found = dict(zip(left["id"].to_pylist(), left["text"].to_pylist(), strict=True))
    assert {name: found[name] for name in clean} == clean


def test_overlaps_count_documents_and_ngrams_of_each_set():
    sets = {"a": as_set("one two three four"), "b": as_set("two three four")}
    table, _ = make_table(sets, 3, 3)
    texts = ["x One, two, three four", "none", "one two three one two three"]
    counted = {}
    count_hits(counted, list(sets), batch(texts), find_hits(table, as_array(texts)))
    assert counted == {
        "a": {
            "documents": 2,
            "hits": 4,
            "examples": [
                {"id": "d0", "text": "One, two, three"},
                {"id": "d2", "text": "one two three"},
            ],
        },
        "b": {"documents": 1, "hits": 1, "examples": [{"id": "d0", "text": "two, three four"}]},
    }


def test_documents_are_dropped_for_the_set_of_their_first_ngram():
    sets = {"a": as_set("one two three"), "b": as_set("four five six")}
    table, _ = make_table(sets, 3, 3)
    texts = ["x", "four five six one two three", "one two three", "y"]
    left, dropped = drop_documents(batch(texts), find_hits(table, as_array(texts)), ["a", "b"])
    assert left == batch(texts).take([0, 3])
    assert dropped == {"contains text of b": [1], "contains text of a": [2]}
