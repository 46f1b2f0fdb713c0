"""Shards joined by reference read as one array."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import cache
from data.token_array import TokenArray
from pipeline.errors import DamagedOutput

SIZES = [0, 50, 1, 0, 0, 20_000, 3, 9000, 0]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Nine shards, some empty, some of a token, some of several chunks; and all their tokens."""
    root = tmp_path_factory.mktemp("shards")
    random_ids, every, directories = np.random.default_rng(0), [], []
    for index, size in enumerate(SIZES):
        ids = random_ids.integers(1, 500, max(0, size - 1)).astype(np.uint32)
        documents = [(ids, np.array([len(ids)]))] if size else []
        counts = cache.write_shard(str(root / str(index)), documents, vocab_size=500, eos_id=0)
        assert counts.tokens == size
        directories.append((str(root / str(index)), size))
        every += [*ids.tolist(), 0] if size else []
    return directories, np.array(every)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), length=st.sampled_from([1, 2, 64, 8192, 9500]))
def test_windows_are_slices_of_the_joined_tokens(shards, data, length):
    """Any window of any length, across any number of shard ends, is a numpy slice."""
    directories, every = shards
    starts = data.draw(st.lists(st.integers(0, len(every) - length), max_size=6))
    array = _array(directories)
    found = array.read(np.array(starts, np.int64), length)
    assert found.dtype == np.int32
    assert found.shape == (len(starts), length)
    for window, start in zip(found, starts, strict=True):
        assert np.array_equal(window, every[start : start + length])


_ARRAYS = {}


def _array(directories):
    return _ARRAYS.setdefault(tuple(directories), TokenArray(directories, 500))


def test_the_whole_array_is_one_window(shards):
    """A window may cover every shard, empty ones included."""
    directories, every = shards
    array = TokenArray(directories, 500, cache_bytes=0)
    assert len(array) == len(every) == sum(SIZES)
    assert np.array_equal(array.read(np.array([0]), len(every))[0], every)


@pytest.mark.parametrize("start", [-1, sum(SIZES) - 9])
def test_windows_outside_are_refused(shards, start):
    """No index wraps around and none reads past the end."""
    with pytest.raises(IndexError, match="inside"):
        TokenArray(shards[0], 500).read(np.array([5, start]), 10)


def test_making_an_array_touches_no_storage(shards):
    """10,000 shards that do not exist can be joined, and the one that does is read among them."""
    real = shards[0][5]
    absent = [(f"/does/not/exist/{index}", 10**6) for index in range(10_000)]
    array = TokenArray([*absent, real], 500)
    assert len(array) == 10**10 + 20_000
    assert array.read(np.array([10**10]), 4).shape == (1, 4)
    with pytest.raises(DamagedOutput, match="/does/not/exist/7:"):
        array.read(np.array([7 * 10**6]), 4)


@pytest.mark.parametrize(("tokens", "vocab_size"), [(49, 500), (51, 500), (50, 100_000)])
def test_a_shard_that_is_not_what_was_said_is_refused(shards, tokens, vocab_size):
    """Another number of tokens or another dtype than declared is damage, not data."""
    directory, _ = shards[0][1]
    with pytest.raises(DamagedOutput, match=r"expected .* tokens of .*, found 50 tokens"):
        TokenArray([(directory, tokens)], vocab_size).read(np.array([0]), 10)


def test_threads_share_an_array(shards):
    """Eight threads that open and read the same shards at once all see the same tokens."""
    directories, every = shards
    array, wrong = TokenArray(directories, 500), []

    def reader(seed):
        starts = np.random.default_rng(seed).integers(0, len(every) - 300, 20)
        for start, window in zip(starts, array.read(starts, 300), strict=True):
            if not np.array_equal(window, every[start : start + 300]):
                wrong.append(start)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
