"""Batches depend on their number alone, and threads end when asked."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import cache
from data.loader import Loader, batch_rows
from data.order import BlockShuffle, SequentialOrder
from data.token_array import TokenArray
from pipeline.errors import DamagedOutput, InputError

LENGTH = 32
SEQUENCES = 250


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """250 sequences of 32 tokens and 5 tokens more, in three shards; sequences cross their ends."""
    root, shards = tmp_path_factory.mktemp("tokens"), []
    ids = (np.arange(SEQUENCES * LENGTH + 5) % 60_000 + 1).astype(np.uint32)
    for index, part in enumerate(np.split(ids, [3001, 3050])):
        documents = [(part[:-1], np.array([len(part) - 1]))]
        counts = cache.write_shard(str(root / str(index)), documents, vocab_size=60_002, eos_id=0)
        shards.append((str(root / str(index)), counts.tokens))
    return TokenArray(shards, 60_002)


def table(tokens):
    """All whole sequences, (sequences, length)."""
    return tokens.read(np.arange(SEQUENCES) * LENGTH, LENGTH)


def order(seed=0):
    return BlockShuffle(sequences=SEQUENCES, io_block_size=8, window_blocks=4, seed=seed)


def take(tokens, count, **more):
    more = {"sequence_length": LENGTH, "batch_size": 12, **more}
    with Loader(tokens, more.pop("order", order()), **more) as loader:
        return [next(loader) for _ in range(count)]


def test_batch_n_is_the_rows_of_batch_n(tokens):
    """Over two epochs each batch is a lookup of `batch_rows` in the table of sequences."""
    rows = table(tokens)
    for n, batch in enumerate(take(tokens, 45)):
        assert batch.dtype == np.int32
        assert batch.shape == (12, LENGTH)
        positions = np.arange(12 * n, 12 * n + 12)
        assert np.array_equal(batch_rows(order(), n, 12), order().rows(positions))
        assert np.array_equal(batch, rows[order().rows(positions)])


@settings(max_examples=12, deadline=None)
@given(processes=st.sampled_from([1, 2, 3, 4, 6, 12]), start=st.integers(0, 60))
def test_any_number_of_processes_from_any_batch_sees_the_same_global_batches(
    tokens, processes, start
):
    """The processes' parts in order are the batch, and starting at k gives the tail."""
    whole = take(tokens, 3, start_batch=start)
    parts = [
        take(tokens, 3, start_batch=start, process_index=i, process_count=processes)
        for i in range(processes)
    ]
    for n in range(3):
        assert np.array_equal(np.concatenate([part[n] for part in parts]), whole[n])
        assert np.array_equal(whole[n], table(tokens)[batch_rows(order(), start + n, 12)])


def test_a_process_reads_its_own_rows_only(tokens):
    """Of a batch of 12, each of 4 processes asks storage for 3 windows."""

    class Counting:
        asked = 0

        def __len__(self):
            return len(tokens)

        def read(self, starts, length):
            Counting.asked += len(starts)
            return tokens.read(starts, length)

    take(Counting(), 5, process_index=2, process_count=4, stop_batch=5)
    assert Counting.asked == 15


def test_evaluation_reads_the_set_once_and_stops(tokens):
    """In sequential order with a last batch the iterator ends after the rows in order."""
    with Loader(
        tokens, SequentialOrder(SEQUENCES), sequence_length=LENGTH, batch_size=25, stop_batch=10
    ) as loader:
        assert np.array_equal(np.concatenate(list(loader)), table(tokens))
        assert list(loader) == []


class Slow:
    """Tokens that take a while, count reads, and fail at one."""

    def __init__(self, seconds=0.0, fail_at=None):
        self.seconds, self.fail_at, self.reads = seconds, fail_at, 0
        self.lock = threading.Lock()

    def __len__(self):
        return SEQUENCES * LENGTH

    def read(self, starts, length):
        with self.lock:
            self.reads += 1
        time.sleep(self.seconds)
        if self.fail_at is not None and starts[0] == self.fail_at * 10 * LENGTH:
            raise DamagedOutput("shard 3 is damaged")
        return np.repeat(starts[:, None], length, 1).astype(np.int32)


def sequential(tokens, **more):
    return Loader(tokens, SequentialOrder(SEQUENCES), sequence_length=LENGTH, batch_size=10, **more)


def test_an_error_is_raised_at_its_batch(tokens):
    """Batches before a damaged one arrive; then its error, and again when asked again."""
    with sequential(Slow(fail_at=4), prefetch=3) as loader:
        firsts = [int(next(loader)[0, 0]) for _ in range(4)]
        assert firsts == [n * 10 * LENGTH for n in range(4)]
        for _ in range(2):
            with pytest.raises(DamagedOutput, match="shard 3"):
                next(loader)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_prefetch_is_bounded(prefetch):
    """However slow the consumer, only so many batches are read ahead."""
    slow = Slow()
    with sequential(slow, prefetch=prefetch) as loader:
        time.sleep(0.1)
        assert slow.reads == prefetch
        next(loader)
        time.sleep(0.1)
        assert slow.reads == prefetch + 1


def test_waiting_is_counted():
    """A consumer faster than storage waits; one that is slower does not."""
    with sequential(Slow(0.05), prefetch=1) as loader:
        for _ in range(4):
            next(loader)
        assert 0.15 < loader.waited < 2
    with sequential(Slow(0.01), prefetch=2) as loader:
        time.sleep(0.2)
        next(loader)
        assert loader.waited < 0.1


def test_closing_is_prompt_and_leaves_no_thread():
    """With reads under way, closing waits for these alone; a closed loader says so."""
    before = threading.active_count()
    loader = sequential(Slow(0.2), prefetch=2)
    began = time.perf_counter()
    loader.close()
    loader.close()
    assert time.perf_counter() - began < 1.5
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="closed"):
        next(loader)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 10, "process_count": 3}, "not divisible by 3"),
        ({"batch_size": 251}, "batch_size=251: expected 1 to 250"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"process_index": 2, "process_count": 2}, "process_index=2"),
        ({"process_count": 0}, "0 processes"),
        ({"order": SequentialOrder(251)}, "251 sequences, but 8005 tokens hold 250"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"start_batch": -1}, "start_batch=-1"),
        ({"sequence_length": 0}, "sequence_length=0"),
    ],
)
def test_impossible_loaders_are_refused(tokens, change, words):
    """Sizes that do not fit are refused before a thread starts."""
    before = threading.active_count()
    with pytest.raises(InputError, match=words):
        take(tokens, 1, **change)
    assert threading.active_count() == before
