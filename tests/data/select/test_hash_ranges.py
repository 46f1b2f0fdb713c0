"""Samples are laws of the hash: disjoint, nested, stable, and as large as asked."""

import hashlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.select import hash_ranges
from data.select.document_hash import document_hash
from data.select.hash_histogram import BINS, HashHistogram, bins_of
from data.select.hash_ranges import HASHES, BoundaryDocuments, Ranges
from data.select.token_budget import Budget
from data.select.token_ratio import TokenRatio
from pipeline.errors import InputError

BIN = 1 << 48


def survey_of(hashes, counts):
    """The survey of documents given by hash and length, by one loop."""
    tokens, documents = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
    for place, count in zip(hashes, counts, strict=True):
        tokens[int(place) >> 48] += int(count)
        documents[int(place) >> 48] += 1
    return HashHistogram(
        seen=len(hashes),
        text_bytes=0,
        tokens_by_bin=tokens,
        documents_by_bin=documents,
    )


def one_a_bin(count=1):
    """A document of one token in the middle of every bin."""
    hashes = (np.arange(BINS, dtype=np.uint64) << np.uint64(48)) + np.uint64(5)
    return survey_of(hashes, np.full(BINS, count))


def thresholds(survey, budget):
    """The ranges to the bin, as where no document is near a boundary."""
    nothing = np.empty(0, np.int64)
    edge = BoundaryDocuments(nothing, nothing.astype(np.uint64), nothing)
    return hash_ranges.thresholds(survey, budget, None, edge)


def members(hashes, ranges):
    """Hashes of the documents of each split, by one loop."""
    return {
        name: [int(h) for h in hashes if first <= int(h) <= last]
        for name, first, last in ranges.splits
    }


def brute_force(hashes, counts, budget, rate):
    """The split of each document by a walk over all in order of hash; None for too little."""
    rows = sorted((int(h), int(c)) for h, c in zip(hashes, counts, strict=True))
    chosen = {}

    def walk(rows, asked):
        held, taken = 0.0, []
        for place, count in rows:
            if held >= asked and place != (taken[-1] if taken else None):
                return taken
            held += count * rate.per_count + rate.per_document
            taken.append(place)
        return taken if held >= asked else None

    for name, asked in budget.splits:
        if asked:
            chosen[name] = walk(rows[::-1], asked)
            if chosen[name] is None:
                return None
            rows = rows[: len(rows) - len(chosen[name])]
    if budget.train == -1:
        chosen["train"] = [place for place, _ in rows]
        return chosen if sum(c * rate.per_count + rate.per_document for _, c in rows) else None
    chosen["train"] = walk(rows, budget.train)
    return None if chosen["train"] is None else chosen


def test_hash_is_the_published_function():
    """The hash is keyed BLAKE2b, little-endian, frozen by two literal values."""
    key = (5).to_bytes(8, "little")
    expected = hashlib.blake2b("ä".encode(), digest_size=8, key=key).digest()
    found = document_hash(["ä"], 5)
    assert found.dtype == np.uint64
    assert int(found[0]) == int.from_bytes(expected, "little")
    assert [hex(h) for h in document_hash(["a", "<urn:uuid:1>"], 0)] == FROZEN


FROZEN = ["0x3a030daba6ec79b9", "0x2bc039f62c42241a"]


def test_hash_of_an_array_is_the_hash_of_its_list_and_seeds_differ():
    """Arrow and Python ids hash alike; another seed is another hash; no ids are no hashes."""
    ids = [f"d{i}" for i in range(100)]
    first = document_hash(ids, 0)
    assert np.array_equal(first, document_hash(pa.array(ids), 0))
    assert np.array_equal(first[37:40], document_hash(pa.array(ids).slice(37, 3), 0))
    assert not np.isin(first, document_hash(ids, -1)).any()
    assert document_hash([], 0).shape == (0,)


PLACES = st.one_of(
    st.integers(0, HASHES - 1),
    st.integers(3 * BIN, 3 * BIN + 9),
    st.sampled_from([0, BIN - 1, BIN, HASHES - 1, HASHES - BIN]),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    documents=st.lists(st.tuples(PLACES, st.integers(0, 50)), min_size=1, max_size=60),
    asked=st.tuples(st.sampled_from([-1, 1, 20, 300]), *[st.integers(0, 200)] * 2),
    rate=st.sampled_from(
        [TokenRatio(), TokenRatio(per_count=1.5, per_document=1), TokenRatio(per_count=0.25)]
    ),
)
def test_the_ranges_are_those_of_a_walk_over_all_documents(documents, asked, rate):
    """Each split ends with the document that meets its budget, which its bin's documents tell."""
    hashes = np.array([place for place, _ in documents], np.uint64)
    counts = np.array([count for _, count in documents], np.int64)
    survey = survey_of(hashes, counts)
    budget = Budget(train=asked[0], splits=(("validation", asked[1]), ("test", asked[2])))
    bins = hash_ranges.boundary_bins(survey, budget, rate)
    inside = np.isin(bins_of(hashes), bins)
    edge = BoundaryDocuments.of(bins, hashes[inside], counts[inside])
    expected = brute_force(hashes, counts, budget, rate)
    if expected is None:
        with pytest.raises(InputError, match="available"):
            hash_ranges.thresholds(survey, budget, rate, edge)
        return
    ranges = hash_ranges.thresholds(survey, budget, rate, edge)
    found = members(hashes, ranges)
    sizes = dict(zip(hashes.tolist(), counts.tolist(), strict=True))
    for name, places in expected.items():
        # Documents of no tokens at the end of a split may be in it or not: nobody trains on them.
        assert [p for p in sorted(found[name]) if sizes[p]] == [
            p for p in sorted(places) if sizes[p]
        ]
    assert ranges.names == budget.names


HELD_OUT = (("validation", 10**5), ("test", 10**5))


def test_a_larger_train_split_contains_the_smaller_and_moves_nothing_else():
    """Train grows at its end only; the held-out splits stay where they are."""
    counts = np.random.default_rng(0).integers(0, 1000, BINS)
    survey = survey_of(np.arange(BINS, dtype=np.uint64) << np.uint64(48), counts)
    small, large, rest = (
        thresholds(survey, Budget(train=train, splits=HELD_OUT)).splits
        for train in (10**6, 10**7, -1)
    )
    assert small[0][2] < large[0][2] < rest[0][2] == rest[2][1] - 1
    assert small[1:] == large[1:] == rest[1:]


def test_a_split_named_later_moves_none_before_it():
    """Places go by the order of the names given, not by the names."""
    survey = one_a_bin()
    one = thresholds(survey, Budget(train=5, splits=(("validation", 10),)))
    two = thresholds(survey, Budget(train=5, splits=(("validation", 10), ("a", 7))))
    assert two.splits[:2] == one.splits
    assert two.splits[2] == ("a", (BINS - 17) * BIN, (BINS - 10) * BIN - 1)


@pytest.mark.parametrize(
    ("train", "held_out", "split"),
    [
        (BINS + 1, (), "train: 65,537"),
        (BINS - 9, (("validation", 10),), "train: 65,527"),
        (1, (("validation", BINS + 1),), "validation: 65,537"),
        (1, (("validation", 10), ("test", BINS - 9)), "test: 65,527"),
        (-1, (("validation", BINS),), "train: 1"),
        (1, (("validation", BINS), ("test", 1)), "test: 1"),
    ],
)
def test_more_than_there_is_says_asked_and_available(train, held_out, split):
    """The message names the split, what was asked and what is there."""
    with pytest.raises(InputError, match=split + " tokens asked, about .* available") as error:
        thresholds(one_a_bin(), Budget(train=train, splits=held_out))
    assert "65,536" in str(error.value)


def test_exactly_all_there_is_can_be_had():
    """The last token is available, in train and held out."""
    assert thresholds(one_a_bin(), Budget(train=BINS)).splits == (("train", 0, HASHES - 1),)
    ranges = thresholds(one_a_bin(), Budget(train=BINS - 10, splits=(("validation", 10),)))
    edge = (BINS - 10) * BIN
    assert ranges.splits == (("train", 0, edge - 1), ("validation", edge, HASHES - 1))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"train": 0}, "tokens=0"),
        ({"train": -2}, "tokens=-2"),
        ({"train": 1, "splits": (("validation", -1),)}, "validation=-1"),
        ({"train": 1, "splits": (("train", 1),)}, "'train'"),
        ({"train": 1, "splits": (("a", 1), ("a", 2))}, "'a'"),
        ({"train": 1, "splits": (("../a", 1),)}, "'../a'"),
        ({"train": 1, "splits": {"a": 1}}, "pairs"),
    ],
)
def test_an_impossible_budget_is_refused(wrong, words):
    """Nothing to train on, less than nothing to hold out, names that are no names."""
    with pytest.raises(InputError) as error:
        Budget(**wrong)
    assert words in str(error.value)


def test_select_is_the_range_that_holds_the_place():
    """The first and the last hash of a range are in it, their neighbours are not."""
    ranges = Ranges(splits=(("train", 0, 9), ("b", HASHES - 5, HASHES - 1), ("c", 20, 29)))
    places = [0, 9, 10, 19, 20, 29, 30, HASHES - 6, HASHES - 5, HASHES - 1]
    found = hash_ranges.select(np.array(places, np.uint64), ranges)
    assert found.tolist() == [0, 0, -1, -1, 2, 2, -1, -1, 1, 1]
