"""Batches depend on their number alone, and threads end when asked."""

import threading
import time

import numpy as np
import pytest

from data.batches.block_shuffle import BlockShuffle
from data.batches.dataset import Dataset
from data.batches.loader import Loader
from pipeline.errors import CorruptOutput, InputError
from tests.data.token_shards import rows_of, source, spec, write_shards

LENGTH = 32
SEQUENCES = 250


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """250 sequences of 32 tokens and 5 tokens more, in three shards: (shards, tokens in lists)."""
    return write_shards(tmp_path_factory.mktemp("tokens"), [3001, 49, 4955])


@pytest.fixture(scope="module")
def dataset(stored):
    with Dataset(spec(source(stored[0]))) as made:
        yield made


def take(dataset, count, **more):
    with Loader(dataset, **{"batch_size": 12, **more}) as loader:
        return [next(loader) for _ in range(count)]


def test_batch_n_is_the_sequences_at_its_positions(dataset, stored):
    """Over two epochs each batch is a lookup of the shuffle in the list of rows."""
    order = BlockShuffle(sequences=SEQUENCES, io_block_size=8, window_blocks=4, seed=0)
    rows = rows_of(stored[1], LENGTH)
    for n, batch in enumerate(take(dataset, 45)):
        assert batch.dtype == np.int32
        positions = np.arange(12 * n, 12 * n + 12)
        assert batch.tolist() == [rows[row] for row in order.rows(positions)]


@pytest.mark.slow
def test_the_number_of_threads_changes_nothing(dataset):
    """Batches come in order however many threads read them."""
    one = take(dataset, 70, threads=1)
    for more in ({"threads": 7}, {"threads": 3, "prefetch_batches": 2}, {"prefetch_bytes": 1}):
        for batch, same in zip(take(dataset, 70, **more), one, strict=True):
            assert np.array_equal(batch, same)


def test_a_loader_stops_where_it_should(dataset):
    """The iterator ends before the last batch's number, at once if it begins there."""
    for start, left in ((0, 20), (19, 1), (20, 0), (30, 0)):
        with Loader(dataset, batch_size=25, start_batch=start, stop_batch=20) as loader:
            assert len(list(loader)) == left
            assert list(loader) == []


class Fake:
    """Rows that are their own number; counts reads, takes a while, fails at one row."""

    sequence_length = LENGTH
    sequences = 100_000

    def __init__(self, seconds=0.0, fail_at=None, is_local=False):
        self.seconds, self.fail_at, self.is_local = seconds, fail_at, is_local
        self.reads, self.begun, self.most, self.now = [], 0, 0, 0
        self.lock = threading.Lock()

    def read(self, rows):
        with self.lock:
            self.reads.append(rows.tolist())
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(self.seconds)
        with self.lock:
            self.now -= 1
        if self.fail_at in rows:
            raise CorruptOutput("shard 3 is corrupt")
        return np.repeat(rows[:, None], self.sequence_length, 1).astype(np.int32)


def test_a_process_reads_its_own_rows_only():
    """Of every batch of 12, one whose devices hold the rows 1, 6 and 7 reads these."""
    fake = Fake()
    take(fake, 50, rows=np.array([1, 6, 7]), stop_batch=50)
    read = sorted(row for rows in fake.reads for row in rows)
    assert read == [12 * n + place for n in range(50) for place in (1, 6, 7)]


def settled(fake):
    """Rows read, when reading has gone as far as it will."""
    read = -1
    while read != (read := sum(map(len, fake.reads))):
        time.sleep(0.1)
    return read


@pytest.mark.parametrize(
    ("limit", "batches"),
    [
        ({"prefetch_batches": 3}, 3),
        ({"prefetch_bytes": 1}, 1),
        ({"prefetch_bytes": 3 * 10 * LENGTH * 4}, 3),
    ],
)
def test_prefetch_is_bounded(limit, batches):
    """A batch of ten rows has 4 bytes a token; one batch is always read ahead."""
    fake = Fake()
    with Loader(fake, batch_size=10, **limit) as loader:
        for handed in (1, 2):
            next(loader)
            while sum(map(len, fake.reads)) < 10 * (handed + batches):
                time.sleep(0.01)
            assert settled(fake) == 10 * (handed + batches)


@pytest.mark.parametrize("fail_at", [0, 45, 1234])
@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_is_raised_at_its_batch(fail_at, threads):
    """Batches before a damaged one arrive; then its error, again and again."""
    with Loader(Fake(fail_at=fail_at), batch_size=10, threads=threads) as loader:
        for n in range(fail_at // 10):
            assert next(loader)[:, 0].tolist() == list(range(10 * n, 10 * n + 10))
        for _ in range(2):
            with pytest.raises(CorruptOutput, match="shard 3"):
                next(loader)


@pytest.mark.parametrize(("is_local", "threads"), [(True, 8), (False, 16)])
def test_a_slow_disk_or_store_is_read_by_all_threads_at_once(is_local, threads):
    """After the first read, reads continue only when every thread has begun one."""
    together, slow = threading.Barrier(threads, timeout=30), Fake(is_local=is_local)
    plain = slow.read

    def read(rows):
        tokens = plain(rows)
        if 0 < slow.reads.index(rows.tolist()) <= threads:
            together.wait()
        return tokens

    slow.read = read
    take(slow, threads + 5, batch_size=10)
    assert slow.most <= threads


def test_closing_is_prompt_and_leaves_no_thread():
    """With reads under way, closing waits for these alone; a closed loader says so."""
    before = threading.active_count()
    loader = Loader(Fake(0.2), batch_size=10)
    began = time.perf_counter()
    loader.close()
    loader.close()
    assert time.perf_counter() - began < 1.5
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="closed"):
        next(loader)


def test_closing_does_not_wait_for_a_store_that_hangs(monkeypatch):
    """A read that never returns holds up neither `close` nor a consumer in another thread."""
    monkeypatch.setattr("data.batches.loader._CLOSE_SECONDS", 0.1)
    released = threading.Event()
    hanging = Fake()
    hanging.read = lambda rows: released.wait(60)
    loader = Loader(hanging, batch_size=10)
    raised = []

    def consume():
        try:
            next(loader)
        except ValueError as error:
            raised.append(str(error))

    consumer = threading.Thread(target=consume)
    consumer.start()
    began = time.perf_counter()
    loader.close()
    consumer.join(10)
    assert time.perf_counter() - began < 5
    assert len(raised) == 1
    assert "closed" in raised[0]
    released.set()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 251}, "batch_size=251: expected 1 to 250"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_impossible_loaders_are_refused(dataset, change, words):
    """Sizes that do not fit are refused before a thread starts."""
    before = threading.active_count()
    with pytest.raises(InputError, match=words):
        take(dataset, 1, **change)
    assert threading.active_count() == before
