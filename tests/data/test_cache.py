"""A shard reads as it was written, or says that it cannot."""

import math
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import cache
from data.token_array import TokenArray
from pipeline.errors import DamagedOutput, InputError, StorageError

EOS = 0


def batches(seed=0, count=40, vocab_size=1000, per_batch=7):
    """`count` documents of random ids, in batches."""
    random_ids = np.random.default_rng(seed)
    lengths = random_ids.integers(0, 900, count)
    for begin in range(0, count, per_batch):
        part = lengths[begin : begin + per_batch]
        yield random_ids.integers(1, vocab_size, part.sum()).astype(np.uint32), part


def flat(parts):
    """The tokens and offsets that a shard of these documents must hold, in plain Python."""
    tokens, offsets = [], [0]
    for ids, lengths in parts:
        begin = 0
        for length in lengths:
            tokens += [*ids[begin : begin + length].tolist(), EOS]
            offsets.append(len(tokens))
            begin += length
    return tokens, offsets


def write(directory, parts=None, vocab_size=1000, **more):
    parts = batches() if parts is None else parts
    return cache.write_shard(str(directory), parts, vocab_size=vocab_size, eos_id=EOS, **more)


def read(directory, counts, vocab_size=1000):
    array = TokenArray([(str(directory), counts.tokens)], vocab_size)
    return array.read(np.array([0]), counts.tokens)[0]


def test_tokens_and_offsets_are_the_documents_with_eos(tmp_path):
    """What is read is what a plain loop over the documents makes."""
    counts = write(tmp_path / "s")
    tokens, offsets = flat(batches())
    assert read(tmp_path / "s", counts).tolist() == tokens
    assert cache.read_offsets(str(tmp_path / "s")).tolist() == offsets
    assert (counts.tokens, counts.documents) == (len(tokens), 40)
    assert np.array_equal(counts.counts, np.bincount(tokens, minlength=1000))
    on_disk = sum(path.stat().st_size for path in (tmp_path / "s").rglob("*") if path.is_file())
    assert counts.bytes_on_disk == on_disk


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32"), (2, "uint16")]
)
def test_dtype_holds_the_largest_id(tmp_path, vocab_size, dtype):
    """The largest id survives on both sides of 65,536."""
    parts = [(np.array([vocab_size - 1], np.uint32), np.array([1]))]
    counts = write(tmp_path / "s", parts, vocab_size)
    assert read(tmp_path / "s", counts, vocab_size).tolist() == [vocab_size - 1, EOS]
    assert cache.describe(str(tmp_path / "s"))["dtype"] == dtype


def test_a_shard_describes_itself(tmp_path):
    """Counts, dtype, vocabulary and tokenizer can be read from the shard alone."""
    counts = write(tmp_path / "s", tokenizer_digest="ab" * 32)
    assert cache.describe(str(tmp_path / "s")) == {
        "tokens": counts.tokens,
        "documents": 40,
        "dtype": "uint16",
        "vocab_size": 1000,
        "eos_id": EOS,
        "tokenizer": "ab" * 32,
    }


def test_digest_depends_on_content_only(tmp_path):
    """Cutting the same documents into other batches changes nothing; one id or length does."""
    digest = write(tmp_path / "a").digest
    assert write(tmp_path / "b").digest == digest
    ids = np.concatenate([part for part, _ in batches()])
    lengths = np.concatenate([part for _, part in batches()])
    assert write(tmp_path / "c", [(ids, lengths)]).digest == digest
    assert cache.content_digest(str(tmp_path / "c")) == digest
    other = ids.copy()
    other[5] = other[5] % 999 + 1
    assert write(tmp_path / "d", [(other, lengths)]).digest != digest
    moved = lengths.copy()
    moved[:2] += [1, -1]
    assert write(tmp_path / "e", [(ids, moved)]).digest != digest


def test_shards_without_documents_and_with_empty_documents(tmp_path):
    """Nothing is a shard of no tokens; an empty document is one EOS."""
    assert write(tmp_path / "none", []).tokens == 0
    assert cache.read_offsets(str(tmp_path / "none")).tolist() == [0]
    counts = write(tmp_path / "empty", [(np.empty(0, np.uint32), np.array([0, 0]))])
    assert read(tmp_path / "empty", counts).tolist() == [EOS, EOS]


def test_wrong_ids_are_refused(tmp_path):
    """An id outside the vocabulary and an EOS inside a document never reach storage."""
    with pytest.raises(InputError, match="found id 1000, expected ids below vocab_size=1000"):
        write(tmp_path / "a", [(np.array([1000], np.uint32), np.array([1]))])
    with pytest.raises(InputError, match="EOS"):
        write(tmp_path / "b", [(np.array([4, EOS], np.uint32), np.array([2]))])
    assert not list(tmp_path.iterdir())


def test_a_shard_is_never_overwritten(tmp_path):
    """A second writer in the same directory fails and changes nothing."""
    digest = write(tmp_path / "s").digest
    with pytest.raises(StorageError):
        write(tmp_path / "s", batches(seed=1))
    assert cache.content_digest(str(tmp_path / "s")) == digest


def test_a_place_that_is_no_store_for_shards_is_refused():
    """Only local paths and gs:// hold shards."""
    with pytest.raises(InputError, match="gs://"):
        write("memory://shard")


def damage(path, kind, numbers):
    """Damage one file of a shard; False when the kind needs another file."""
    content = bytearray(path.read_bytes())
    if kind == "delete":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "cut":
        path.write_bytes(content[: numbers.randrange(1, len(content))])
    elif kind == "flip":
        content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
        path.write_bytes(content)
    elif kind == "zeros":
        begin = numbers.randrange(len(content))
        content[begin : begin + 4096] = bytes(len(content[begin : begin + 4096]))
        path.write_bytes(content)


@pytest.mark.parametrize("kind", ["delete", "empty", "cut", "flip", "zeros"])
def test_no_damage_reads_as_data(tmp_path, kind):
    """Any file damaged in any way: the tokens are right or `DamagedOutput` names the shard."""
    counts = write(tmp_path / "good", batches(count=80))
    expected = read(tmp_path / "good", counts)
    numbers, errors = random.Random(kind), 0
    files = [
        p.relative_to(tmp_path / "good") for p in (tmp_path / "good").rglob("*") if p.is_file()
    ]
    trials = 2 * len(files) if kind in ("delete", "empty") else 30
    for trial in range(trials):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        damage(tmp_path / "bad" / files[trial % len(files)], kind, numbers)
        try:
            found = read(tmp_path / "bad", counts), cache.content_digest(str(tmp_path / "bad"))
        except DamagedOutput as damaged:
            found, message = None, str(damaged)
        if found is None:
            assert str(tmp_path / "bad") in message
            assert "\n" not in message
            errors += 1
        else:
            assert np.array_equal(found[0], expected)
            assert found[1] == counts.digest
    assert errors > 0.8 * trials


def test_files_of_another_shard_do_not_read_as_data(tmp_path):
    """Data files swapped between two shards are noticed."""
    first, second = write(tmp_path / "a"), write(tmp_path / "b", batches(seed=1))
    assert first.digest != second.digest
    a, b = (next((tmp_path / name / "d").iterdir()) for name in "ab")
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)
    for name, counts in (("a", first), ("b", second)):
        with pytest.raises(DamagedOutput):
            read(tmp_path / name, counts)


def test_all_zero_chunks_are_data_and_not_missing(tmp_path):
    """Ids equal to the fill value are stored: reading them is no error."""
    zeros = [(np.zeros(30_000, np.uint32), np.array([30_000]))]
    counts = cache.write_shard(str(tmp_path / "s"), zeros, vocab_size=1000, eos_id=1)
    assert counts.counts[0] == 30_000


def test_what_does_not_read_back_is_not_reported_as_written(tmp_path, monkeypatch):
    """A store that tears what it was given is noticed before the shard counts."""
    real = cache._write

    def torn(directory, *rest):
        real(directory, *rest)
        biggest = max(Path(directory).rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
        biggest.write_bytes(biggest.read_bytes()[:-100])

    monkeypatch.setattr(cache, "_write", torn)
    with pytest.raises(StorageError, match="does not read back"):
        write(tmp_path / "s")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50).filter(any))
def test_unigram_entropy_is_the_sum_over_frequencies(counts):
    """The entropy equals the textbook sum, and a uniform vocabulary has log(n) nats."""
    total = sum(counts)
    expected = -sum(c / total * math.log(c / total) for c in counts if c)
    assert cache.unigram_entropy(np.array(counts)) == pytest.approx(expected, abs=1e-12)
    assert cache.unigram_entropy(np.full(64, 3)) == pytest.approx(math.log(64))


def test_entropy_of_nothing_is_refused():
    """No tokens have no entropy."""
    with pytest.raises(InputError, match="no tokens"):
        cache.unigram_entropy(np.zeros(5, np.int64))
