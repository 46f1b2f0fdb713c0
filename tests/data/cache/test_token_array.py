"""Shards joined by reference read as one array."""

import errno
import json
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.cache import chunks, token_array, token_shard
from data.cache.token_array import TokenArray
from data.cache.token_shard import TokenShard
from pipeline.errors import CorruptOutput, InputError, StorageError

SIZES = [0, 50, 1, 0, 0, 20_000, 3, 9000, 0]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Nine shards, some empty, some of a token, some of several chunks; and all their tokens."""
    root = tmp_path_factory.mktemp("shards")
    random_ids, every, directories = np.random.default_rng(0), [], []
    for index, size in enumerate(SIZES):
        ids = random_ids.integers(1, 500, max(0, size - 1)).astype(np.uint32)
        documents = [(ids, np.array([len(ids)]))] if size else []
        counts = token_shard.write_shard(
            str(root / str(index)), documents, vocab_size=500, eos_id=0
        )
        assert counts.tokens == size
        directories.append(TokenShard(str(root / str(index)), size, counts.check))
        every += [*ids.tolist(), 0] if size else []
    return directories, np.array(every)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), length=st.sampled_from([1, 2, 64, 1024, 2048, 8192, 9500]))
def test_windows_are_slices_of_the_joined_tokens(shards, data, length):
    """Any window of any length, across any number of shard ends, is a numpy slice."""
    directories, every = shards
    # Also at the beginnings of chunks of the big shards, which begin at 51 and 20,054.
    begins = list(range(51, len(every) - length, 1024))
    anywhere = st.integers(0, len(every) - length)
    starts = data.draw(st.lists(st.one_of(anywhere, st.sampled_from(begins)), max_size=80))
    array = _array(directories)
    found = array.read(np.array(starts, np.int64), length)
    assert found.dtype == np.int32
    assert found.shape == (len(starts), length)
    for window, start in zip(found, starts, strict=True):
        assert np.array_equal(window, every[start : start + length])


_ARRAYS = {}


def _array(directories):
    return _ARRAYS.setdefault(tuple(directories), TokenArray(directories, 500))


@pytest.mark.parametrize("start", [-1, sum(SIZES) - 9])
def test_windows_outside_are_refused(shards, start):
    """No index wraps around and none reads past the end."""
    with pytest.raises(IndexError, match="inside"):
        TokenArray(shards[0], 500).read(np.array([5, start]), 10)


def test_making_an_array_touches_no_storage(shards):
    """10,000 shards that do not exist can be joined, and the one that does is read among them."""
    real = shards[0][5]
    absent = [TokenShard(f"/does/not/exist/{index}", 10**6) for index in range(10_000)]
    array = TokenArray([*absent, real], 500)
    assert len(array) == 10**10 + 20_000
    assert array.read(np.array([10**10]), 4).shape == (1, 4)
    with pytest.raises(CorruptOutput, match="/does/not/exist/7:"):
        array.read(np.array([7 * 10**6]), 4)


@pytest.mark.parametrize(("tokens", "vocab_size"), [(49, 500), (51, 500), (50, 100_000)])
def test_a_shard_that_is_not_what_was_said_is_refused(shards, tokens, vocab_size):
    """Another number of tokens or another dtype than declared is damage, not data."""
    shard = shards[0][1]._replace(tokens=tokens)
    with pytest.raises(CorruptOutput, match=r"found 50 tokens of uint16 instead of"):
        TokenArray([shard], vocab_size).read(np.array([0]), 10)


def _written(directory, size=5000, seed=0, **more):
    """A shard of one document of `size` - 1 random ids and the EOS; and its tokens."""
    ids = np.random.default_rng(seed).integers(1, 500, size - 1).astype(np.uint32)
    more = {"vocab_size": 500, "eos_id": 0} | more
    counts = token_shard.write_shard(str(directory), [(ids, np.array([len(ids)]))], **more)
    return TokenShard(str(directory), counts.tokens, counts.check), np.append(ids, 0)


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    """The error names both digests; without a digest nobody asked."""
    shard, tokens = _written(tmp_path / "s", tokenizer_digest="aa" * 32)
    for digest in ("", "aa" * 32):
        array = TokenArray([shard], 500, tokenizer_digest=digest)
        assert np.array_equal(array.read(np.array([0]), 5000)[0], tokens)
    with pytest.raises(InputError, match=f"{'bb' * 32}.*{'aa' * 32}"):
        TokenArray([shard], 500, tokenizer_digest="bb" * 32).read(np.array([0]), 10)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path):
    """A larger vocabulary than the shard's is no harm, a smaller one is."""
    shard, _ = _written(tmp_path / "s")
    assert TokenArray([shard], 512).read(np.array([0]), 10).shape == (1, 10)
    with pytest.raises(InputError, match=r"expected ids below vocab_size=499, found .* 500"):
        TokenArray([shard], 499).read(np.array([0]), 10)


@pytest.mark.parametrize("length", [1024, 1000])
def test_a_sound_shard_in_the_place_of_another_is_refused(tmp_path, length):
    """Directories swapped, or files, or chunks: nothing but the right tokens is read."""
    first, _ = _written(tmp_path / "a", seed=1)
    _written(tmp_path / "b", seed=2)
    swapped = first._replace(directory=str(tmp_path / "b"))
    with pytest.raises(CorruptOutput, match="SHA-256"):
        TokenArray([swapped], 500).read(np.array([0]), length)
    (tmp_path / "b/tokens/c/0").rename(tmp_path / "a/tokens/c/0")
    with pytest.raises(CorruptOutput, match=r"corrupt chunk 1 of tokens/c/0"):
        TokenArray([first], 500).read(np.array([1024]), length)


def test_windows_go_into_the_array_that_was_given(shards):
    """All of it is filled, and one of another kind is refused."""
    directories, every = shards
    array, out = _array(tuple(directories)), np.full((2, 1024), -1, np.int32)
    assert array.read(np.array([51, 3000]), 1024, out) is out
    assert np.array_equal(out[0], every[51:1075])
    assert np.array_equal(out[1], every[3000:4024])
    for wrong in (np.empty((2, 1024), np.int64), np.empty((2, 2048), np.int32)[:, ::2]):
        with pytest.raises(AssertionError):
            array.read(np.array([0, 1]), 1024, wrong)


def test_nothing_is_read_as_nothing(shards):
    """No windows and windows of no tokens have their shape."""
    array = _array(tuple(shards[0]))
    assert array.read(np.empty(0, np.int64), 10).shape == (0, 10)
    assert array.read(np.array([0, len(array)]), 0).shape == (2, 0)
    assert len(TokenArray([], 500)) == 0


@pytest.mark.parametrize(
    "length", [1024, 63 * 1024, 64 * 1024, 65 * 1024, 128 * 1024, 64 * 1024 - 1, 150_001]
)
def test_windows_longer_than_what_is_read_at_once(tmp_path, length):
    """They come in parts, across shards too; and so do many windows."""
    written = [
        _written(tmp_path / str(seed), size, seed) for seed, size in ((0, 170_000), (1, 90_000))
    ]
    every = np.concatenate([tokens for _, tokens in written])
    with TokenArray([shard for shard, _ in written], 500) as array:
        for starts in ([0], [1024, 0], [5, 1024, 100_000], list(range(0, 66 * 1024, 1024))):
            starts = np.array([start for start in starts if start + length <= len(every)])
            found = array.read(starts, length)
            assert all(
                np.array_equal(window, every[start : start + length])
                for start, window in zip(starts, found, strict=True)
            )


def test_threads_share_few_open_files(tmp_path, monkeypatch):
    """A file that one thread lets go is not closed under another."""
    monkeypatch.setattr(token_array, "_MOST_OPEN", 2)
    written = [_written(tmp_path / str(index), 4096, index) for index in range(8)]
    every = np.concatenate([tokens for _, tokens in written])
    array, wrong = TokenArray([shard for shard, _ in written], 500), []

    def reader(seed):
        numbers = np.random.default_rng(seed)
        for length in (1024, 900):
            for _ in range(30):
                starts = numbers.integers(0, 31, 8) * 1024
                found = array.read(starts, length)
                if not np.array_equal(found, every[starts[:, None] + np.arange(length)]):
                    wrong.append(starts)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_layout_of_another_version_is_refused(tmp_path):
    """Sound by its checksums, and not what this code writes."""
    _written(tmp_path / "s")
    changes = [{"data_type": "float99"}, {"codecs": []}, {"more": 1}, []]
    for change in (*changes, *({"shape": shape} for shape in ("x", [], [9000], [5000.0]))):
        about = json.loads((tmp_path / "s/tokens/zarr.json").read_bytes())
        about = json.dumps(about | change if change else change).encode()
        (tmp_path / "t/tokens").mkdir(parents=True, exist_ok=True)
        (tmp_path / "t/checksums/c").mkdir(parents=True, exist_ok=True)
        (tmp_path / "t/tokens/zarr.json").write_bytes(about)
        sealed = (tmp_path / "s/checksums/c/0").read_bytes()
        checksums = chunks.unseal(sealed, chunks.CRC).copy()
        checksums[-1] = chunks.checksum(about)
        (tmp_path / "t/checksums/c/0").write_bytes(chunks.seal(checksums))
        with pytest.raises(CorruptOutput, match="another layout"):
            TokenArray([TokenShard(str(tmp_path / "t"), 5000)], 500).read(np.array([0]), 10)


def _open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("length", [1024, 1500])
def test_few_files_are_open_at_a_time(tmp_path, monkeypatch, length):
    """One call that touches more shards than there may be open files reads them all."""
    monkeypatch.setattr(token_array, "_MOST_OPEN", 3)
    written = [_written(tmp_path / str(index), 2048, index) for index in range(12)]
    before = _open_files()
    with TokenArray([shard for shard, _ in written], 500) as array:
        starts = np.arange(0, 11 * 2048, 2048)
        every = np.concatenate([tokens for _, tokens in written])
        for _ in range(2):
            for start, window in zip(starts, array.read(starts, length), strict=True):
                assert np.array_equal(window, every[start : start + length])
        assert _open_files() <= before + 3
    assert _open_files() == before


def test_a_failing_disk_is_not_called_damage(tmp_path, monkeypatch):
    """An I/O error is the storage's, and the next read succeeds."""
    shard, tokens = _written(tmp_path / "s")
    array = TokenArray([shard], 500)
    array.read(np.array([0]), 10)

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        with pytest.raises(StorageError, match="Input/output error"):
            array.read(np.array([0]), 10)
    assert np.array_equal(array.read(np.array([0]), 10)[0], tokens[:10])


def test_short_reads_are_continued(tmp_path, monkeypatch):
    """A read that brings a part of what was asked for is no end of the file."""
    shard, tokens = _written(tmp_path / "s")
    real, asked = os.preadv, []

    def some(descriptor, buffers, offset):
        asked.append(offset)
        return real(descriptor, [buffers[0].cast("B")[:700]], offset)

    monkeypatch.setattr(os, "preadv", some)
    assert np.array_equal(TokenArray([shard], 500).read(np.array([0]), 2048)[0], tokens[:2048])
    assert len(asked) > 5


def test_a_file_cut_while_it_is_open_is_damage(tmp_path):
    """What was whole at opening and ends early now is an error."""
    shard, _ = _written(tmp_path / "s")
    array = TokenArray([shard], 500)
    array.read(np.array([0]), 10)
    os.truncate(tmp_path / "s/tokens/c/0", 3000)
    with pytest.raises(CorruptOutput, match="ends at byte 3000"):
        array.read(np.array([1024]), 1024)
