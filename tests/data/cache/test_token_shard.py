"""A shard reads as it was written, or says that it cannot."""

import math
import resource
import shutil
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.cache import token_shard
from data.cache.shard_io import wait
from data.cache.token_array import TokenArray
from data.cache.token_shard import TokenShard
from pipeline.errors import CorruptOutput, InputError, StorageError, StoreUnavailable
from tests.data.token_shards import content_digest, describe

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
    return token_shard.write_shard(str(directory), parts, vocab_size=vocab_size, eos_id=EOS, **more)


def read(directory, counts, vocab_size=1000):
    array = TokenArray([TokenShard(str(directory), counts.tokens, counts.check)], vocab_size)
    return array.read(np.array([0]), counts.tokens)[0]


def test_tokens_and_offsets_are_the_documents_with_eos(tmp_path):
    """What is read is what a plain loop over the documents makes."""
    counts = write(tmp_path / "s")
    tokens, offsets = flat(batches())
    assert read(tmp_path / "s", counts).tolist() == tokens
    assert token_shard.read_offsets(str(tmp_path / "s")).tolist() == offsets
    assert (counts.tokens, counts.documents) == (len(tokens), 40)
    assert np.array_equal(counts.counts, np.bincount(tokens, minlength=1000))


@pytest.mark.parametrize("bos", [None, EOS, 999])
def test_a_bos_of_its_own_begins_every_document(tmp_path, bos):
    """Also an empty one; where it is EOS, that of the document before begins the next."""
    counts = write(tmp_path / "s", bos_id=bos)
    tokens, offsets = flat(batches())
    begins = [999] if bos == 999 else []
    pairs = list(pairwise(offsets))
    expected = [i for first, last in pairs for i in (*begins, *tokens[first:last])]
    assert read(tmp_path / "s", counts).tolist() == expected
    found = token_shard.read_offsets(str(tmp_path / "s")).tolist()
    assert found == [o + n * len(begins) for n, o in enumerate(offsets)]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1 << 16, "uint16"), ((1 << 16) + 1, "uint32"), (2, "uint16")]
)
def test_dtype_holds_the_largest_id(tmp_path, vocab_size, dtype):
    """The largest id survives on both sides of 65,536."""
    parts = [(np.array([vocab_size - 1], np.uint32), np.array([1]))]
    counts = write(tmp_path / "s", parts, vocab_size)
    assert read(tmp_path / "s", counts, vocab_size).tolist() == [vocab_size - 1, EOS]
    assert describe(str(tmp_path / "s"))["dtype"] == dtype


def test_digest_depends_on_content_only(tmp_path):
    """Cutting the same documents into other batches changes nothing; one id or length does."""
    digest = write(tmp_path / "a").digest
    assert write(tmp_path / "b").digest == digest
    ids = np.concatenate([part for part, _ in batches()])
    lengths = np.concatenate([part for _, part in batches()])
    assert write(tmp_path / "c", [(ids, lengths)]).digest == digest
    assert content_digest(str(tmp_path / "c")) == digest
    other = ids.copy()
    other[5] = other[5] % 999 + 1
    assert write(tmp_path / "d", [(other, lengths)]).digest != digest
    moved = lengths.copy()
    moved[:2] += [1, -1]
    assert write(tmp_path / "e", [(ids, moved)]).digest != digest


def test_shards_without_documents_and_with_empty_documents(tmp_path):
    """Nothing is a shard of no tokens; an empty document is one EOS."""
    assert write(tmp_path / "none", []).tokens == 0
    assert token_shard.read_offsets(str(tmp_path / "none")).tolist() == [0]
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
    with pytest.raises(StorageError, match="expected an empty directory"):
        write(tmp_path / "s", batches(seed=1))
    assert content_digest(str(tmp_path / "s")) == digest


def test_a_place_that_is_no_store_for_shards_is_refused():
    """Only local paths and gs:// hold shards."""
    with pytest.raises(InputError, match="gs://"):
        write("memory://shard")


def test_the_check_tells_shards_apart(tmp_path):
    """It differs by one id, by where a document ends, and by what the attributes say."""
    ids, lengths = np.arange(1, 900, dtype=np.uint32), np.array([400, 499])
    checks = {
        write(tmp_path / "a", [(ids, lengths)]).check,
        write(tmp_path / "b", [(ids[::-1].copy(), lengths)]).check,
        # All the ids are equal, so that nothing but the offsets tells.
        write(tmp_path / "c", [(ids * 0 + 7, lengths)]).check,
        write(tmp_path / "d", [(ids * 0 + 7, lengths[::-1].copy())]).check,
        write(tmp_path / "e", [(ids, lengths)], tokenizer_digest="ab").check,
        write(tmp_path / "f", [(ids, lengths)], vocab_size=1001).check,
    }
    assert len(checks) == 6


def test_offsets_of_another_shard_are_refused(tmp_path):
    """Offsets that are sound in themselves count only where they belong."""
    first, _ = write(tmp_path / "a"), write(tmp_path / "b", batches(seed=1))
    other = (tmp_path / "b/offsets/c/0").read_bytes()
    (tmp_path / "a/offsets/c/0").write_bytes(other)
    for read_some in (token_shard.read_offsets, content_digest, describe):
        with pytest.raises(CorruptOutput, match="offsets"):
            read_some(str(tmp_path / "a"))
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "b").rename(tmp_path / "a")
    with pytest.raises(CorruptOutput, match="checksums"):
        token_shard.read_offsets(str(tmp_path / "a"), first.check)


def test_all_zero_chunks_are_data_and_not_missing(tmp_path):
    """Ids equal to the fill value are stored: reading them is no error."""
    zeros = [(np.zeros(30_000, np.uint32), np.array([30_000]))]
    counts = token_shard.write_shard(str(tmp_path / "s"), zeros, vocab_size=1000, eos_id=1)
    assert counts.counts[0] == 30_000


def after_writing(monkeypatch, change):
    """Let something happen to the files between writing and reading back."""
    real = token_shard._read_back

    def spoiled(directory, *more):
        change(Path(directory))
        real(directory, *more)

    monkeypatch.setattr(token_shard, "_read_back", spoiled)


@pytest.mark.parametrize("kind", ["gone", "cut", "bit"])
@pytest.mark.parametrize("name", ["zarr.json", "c/0"])
@pytest.mark.parametrize("array", ["tokens", "offsets", "checksums"])
def test_what_does_not_read_back_is_not_reported_as_written(
    tmp_path, monkeypatch, array, name, kind
):
    """Any file that a store loses or tears is noticed before the shard counts; and is no damage."""

    def tear(directory):
        file = directory / array / name
        content = bytearray(file.read_bytes())
        content[-7] ^= 2 * (kind == "bit")
        file.write_bytes(content[:-3] if kind == "cut" else content)
        if kind == "gone":
            file.unlink()

    after_writing(monkeypatch, tear)
    with pytest.raises(StorageError, match="does not read back"):
        write(tmp_path / "s")


def test_a_disk_that_refuses_is_a_storage_error(tmp_path):
    """Whatever the operating system says, it is said in this project's terms; a step may retry."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="Not a directory"):
        write(tmp_path / "file/s")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (100, 3000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(StorageError, match="File too large"):
                write(tmp_path / str(size))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Failed:
    """A future of TensorStore that has failed."""

    def __init__(self, error):
        self.error = error

    def result(self, timeout):
        """Fail."""
        raise self.error


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("NOT_FOUND", StorageError),
        ("OUT_OF_RANGE", StorageError),
        ("DATA_LOSS", StorageError),
        ("PERMISSION_DENIED", StorageError),
        ("FAILED_PRECONDITION", StorageError),
        ("ALREADY_EXISTS", StorageError),
        ("RESOURCE_EXHAUSTED", StoreUnavailable),
        ("UNAVAILABLE", StoreUnavailable),
        ("UNKNOWN", StoreUnavailable),
    ],
)
def test_errors_of_tensorstore_while_writing(word, kind):
    """Never damage, since nothing finished was read; transient where trying again may help."""
    error = ValueError(f"{word}: no luck [source locations='x']")
    with pytest.raises(kind, match="no luck") as caught:
        wait(Failed(error), "/s", writing=True)
    assert type(caught.value) is kind
    with pytest.raises(StoreUnavailable, match="no answer"):
        wait(Failed(TimeoutError()), "/s", writing=True)


def test_one_of_two_writers_wins(tmp_path):
    """Two that begin at once: one shard, sound and of the winner; the other is told."""
    for trial in range(3):
        directory, start, done = tmp_path / str(trial), threading.Barrier(2), {}

        def writer(seed, directory=directory, start=start, done=done):
            parts = list(batches(seed=seed))
            start.wait()
            try:
                done[seed] = write(directory, parts)
            except StorageError as error:
                done[seed] = str(error)

        threads = [threading.Thread(target=writer, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (told,) = [found for found in done.values() if isinstance(found, str)]
        (seed,) = [seed for seed, found in done.items() if found is not told]
        assert "expected an empty directory" in told
        assert read(directory, done[seed]).tolist() == flat(batches(seed=seed))[0]
        assert content_digest(str(directory)) == done[seed].digest


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=50).filter(any))
def test_unigram_entropy_is_the_sum_over_frequencies(counts):
    """The entropy equals the textbook sum, and a uniform vocabulary has log(n) nats."""
    total = sum(counts)
    expected = -sum(c / total * math.log(c / total) for c in counts if c)
    assert token_shard.unigram_entropy(np.array(counts)) == pytest.approx(expected, abs=1e-12)
    assert token_shard.unigram_entropy(np.full(64, 3)) == pytest.approx(math.log(64))


def test_entropy_of_nothing_is_refused():
    """No tokens have no entropy."""
    with pytest.raises(InputError, match="no tokens"):
        token_shard.unigram_entropy(np.zeros(5, np.int64))
