"""Samples are laws of the hash: disjoint, nested, stable, and as large as asked."""

import dataclasses
import hashlib
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import sampling
from data.parquet import list_units
from data.sampling import BINS, Budget, Ranges
from data.table import read_table
from pipeline.errors import InputError

SCHEMA = ("id", "text", "token_count")


def survey_of(tokens_by_bin):
    tokens = np.asarray(tokens_by_bin, np.int64)
    documents = (tokens > 0).astype(np.int64)
    return sampling.Survey(
        documents=int(documents.sum()),
        tokens=int(tokens.sum()),
        text_bytes=4 * int(tokens.sum()),
        tokens_by_bin=tokens,
        documents_by_bin=documents,
    )


@pytest.fixture
def units(tmp_path):
    """2,000 documents in two files, every tenth of white space alone."""
    for index in range(2):
        ids = [f"<urn:uuid:{index}-{i}>" for i in range(1000)]
        texts = [" \n" if i % 10 == 0 else f"document {i} " * (i % 7 + 1) for i in range(1000)]
        table = pa.table({"id": ids, "text": texts, "token_count": [len(t) // 4 for t in texts]})
        pq.write_table(table, tmp_path / f"{index}.parquet", row_group_size=100)
    return list_units(f"{tmp_path}/*.parquet", target_bytes=20_000)


def test_hash_is_the_published_function():
    """The hash is keyed BLAKE2b, little-endian, frozen by two literal values."""
    key = (5).to_bytes(8, "little")
    expected = hashlib.blake2b("ä".encode(), digest_size=8, key=key).digest()
    found = sampling.document_hash(["ä"], 5)
    assert found.dtype == np.uint64
    assert int(found[0]) == int.from_bytes(expected, "little")
    assert [hex(h) for h in sampling.document_hash(["a", "<urn:uuid:1>"], 0)] == FROZEN


FROZEN = ["0x3a030daba6ec79b9", "0x2bc039f62c42241a"]


def test_hash_of_an_array_is_the_hash_of_its_list_and_seeds_differ():
    """Arrow and Python ids hash alike; another seed is another hash; no ids are no hashes."""
    ids = [f"d{i}" for i in range(100)]
    first = sampling.document_hash(ids, 0)
    assert np.array_equal(first, sampling.document_hash(pa.array(ids), 0))
    assert not np.isin(first, sampling.document_hash(ids, -1)).any()
    assert sampling.document_hash([], 0).shape == (0,)


def test_places_are_uniform():
    """Chi-squared of 100,000 hashes over 64 ranges stays within five standard deviations."""
    hashes = sampling.document_hash([f"document-{i}" for i in range(100_000)], 1)
    counts = np.bincount((hashes >> np.uint64(58)).astype(int), minlength=64)
    chi = ((counts - 100_000 / 64) ** 2 / (100_000 / 64)).sum()
    assert abs(chi - 63) < 5 * math.sqrt(2 * 63)


def test_survey_of_units_is_a_count_by_hand(units):
    """Merged surveys equal one pass over all rows in Python."""
    found = sampling.merge(sampling.survey(unit, 3) for unit in units)
    tokens, documents = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
    for file in sorted({unit.file for unit in units}):
        table = pq.read_table(file)
        for name, count in zip(
            table["id"].to_pylist(), table["token_count"].to_pylist(), strict=True
        ):
            place = int(sampling.document_hash([name], 3)[0]) >> 48
            tokens[place] += count
            documents[place] += 1
    assert np.array_equal(found.tokens_by_bin, tokens)
    assert np.array_equal(found.documents_by_bin, documents)
    assert (found.documents, found.tokens) == (2000, tokens.sum())
    assert found.text_bytes == sum(unit.text_bytes for unit in units)
    assert sampling.merge([]).documents == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 99),
    fractions=st.tuples(*[st.floats(0.0, 0.33)] * 3),
    ratio=st.sampled_from([0.5, 1.0, 1.3]),
)
def test_every_split_holds_what_was_asked_and_less_than_a_bin_more(seed, fractions, ratio):
    """Asked <= predicted, and without its edge bin a split holds less than asked; none overlap."""
    survey = survey_of(np.random.default_rng(seed).integers(0, 1000, BINS))
    train, validation, test = (int(f * survey.tokens * ratio) for f in fractions)
    budget = Budget(train=max(1, train), validation=validation, test=test)
    ranges = sampling.thresholds(survey, budget, ratio)
    assert 0 == ranges.train[0] < ranges.train[1] <= ranges.test[0]
    assert ranges.test[1] == ranges.validation[0] <= ranges.validation[1] == BINS
    for name, edge in (("train", -1), ("validation", 0), ("test", 0)):
        begin, end = getattr(ranges, name)
        asked = getattr(budget, name)
        held = survey.tokens_by_bin[begin:end] * ratio
        assert held.sum() >= asked
        assert not asked or held.sum() - held[edge] < asked
        assert asked or begin == end


def test_a_larger_train_split_contains_the_smaller_and_moves_nothing_else():
    """Train grows at its end only; validation and test stay where they are."""
    survey = survey_of(np.random.default_rng(0).integers(0, 1000, BINS))
    small = sampling.thresholds(survey, Budget(train=10**6, validation=10**5, test=10**5))
    large = sampling.thresholds(survey, Budget(train=10**7, validation=10**5, test=10**5))
    rest = sampling.thresholds(survey, Budget(train=-1, validation=10**5, test=10**5))
    assert small.train[1] < large.train[1] < rest.train[1] == rest.test[0]
    assert small.validation == large.validation == rest.validation
    assert small.test == large.test == rest.test


@pytest.mark.parametrize(
    ("budget", "split"),
    [
        (Budget(train=BINS + 1, validation=0), "train: 65,537"),
        (Budget(train=BINS - 9, validation=10), "train: 65,527"),
        (Budget(train=1, validation=BINS + 1), "validation: 65,537"),
        (Budget(train=1, validation=10, test=BINS - 9), "test: 65,527"),
        (Budget(train=-1, validation=BINS), "train: 1"),
        (Budget(train=1, validation=BINS, test=1), "test: 1"),
    ],
)
def test_more_than_there_is_says_asked_and_available(budget, split):
    """The message names the split, what was asked and what is there."""
    survey = survey_of(np.ones(BINS))
    with pytest.raises(InputError, match=split + " tokens asked, about .* available") as error:
        sampling.thresholds(survey, budget)
    assert "65,536" in str(error.value)


def test_exactly_all_there_is_can_be_had():
    """The last token is available, in train and in validation."""
    survey = survey_of(np.ones(BINS))
    assert sampling.thresholds(survey, Budget(train=BINS, validation=0)).train == (0, BINS)
    ranges = sampling.thresholds(survey, Budget(train=BINS - 10, validation=10))
    assert ranges.train == (0, BINS - 10)
    assert ranges.validation == (BINS - 10, BINS)


@pytest.mark.parametrize(
    "wrong",
    [{"train": 0, "validation": 1}, {"train": -2, "validation": 1}, {"train": 1, "validation": -1}],
)
def test_an_impossible_budget_is_refused(wrong):
    """Nothing to train on, or less than nothing to hold out."""
    with pytest.raises(InputError, match=r"Budget\."):
        Budget(**wrong)


def test_select_is_the_range_that_holds_the_place():
    """Edges belong to the split that begins there."""
    ranges = Ranges(train=(0, 2), validation=(BINS - 1, BINS), test=(BINS - 3, BINS - 1))
    bins = np.array([0, 1, 2, BINS - 4, BINS - 3, BINS - 2, BINS - 1], np.uint64)
    hashes = (bins << np.uint64(48)) + np.uint64(2**48 - 1)
    assert sampling.select(hashes, ranges).tolist() == [0, 0, -1, -1, 2, 2, 1]


def test_sampled_files_are_the_selected_documents(units, tmp_path):
    """Each split's file holds its documents in source order; every document is accounted for."""
    survey = sampling.merge(sampling.survey(unit, 7) for unit in units)
    ranges = sampling.thresholds(survey, Budget(train=4000, validation=800, test=400))
    total = {"documents": 0, "dropped": 0}
    for index, unit in enumerate(units):
        out = tmp_path / "out" / str(index)
        counts = sampling.sample_unit(unit, ranges, 7, str(out))
        source = pq.ParquetFile(unit.file).read_row_groups(list(unit.row_groups)).to_pylist()
        outside = empty = 0
        expected = {}
        for row in source:
            place = int(sampling.document_hash([row["id"]], 7)[0]) >> 48
            hits = [
                f.name
                for f in dataclasses.fields(Ranges)
                if getattr(ranges, f.name)[0] <= place < getattr(ranges, f.name)[1]
            ]
            if not hits:
                outside += 1
            elif not row["text"].strip():
                empty += 1
            else:
                expected.setdefault(hits[0], []).append(row)
        assert counts.pop("dropped") == {"empty text": empty, "outside the ranges": outside}
        assert {path.stem for path in out.glob("*")} == set(expected) == set(counts)
        for name, documents in expected.items():
            written = pa.Table.from_batches(read_table(str(out / f"{name}.parquet")))
            assert written.schema.names == list(SCHEMA)
            assert written.to_pylist() == documents
            assert counts[name] == {
                "documents": len(documents),
                "tokens": sum(row["token_count"] for row in documents),
                "bytes": sum(len(row["text"].encode()) for row in documents),
            }
            total["documents"] += len(documents)
        total["dropped"] += outside + empty
    assert total["documents"] + total["dropped"] == 2000
    assert total["documents"] > 300
