"""A shard in a bucket: written, read and refused as on a local disk, with a server that fails."""

import numpy as np
import pytest

from data.cache import shard_io, token_shard
from data.cache.token_array import TokenArray
from data.cache.token_shard import TokenShard
from pipeline.errors import StorageError, StoreUnavailable
from pipeline.store import object_storage, storage
from tests.data.token_shards import content_digest
from tests.faults.fake_gcs import FakeGCS, Faults
from tests.faults.s3_server import s3

__all__ = ["s3"]

URL = "gs://bucket/store/shard"
KEY = "store/shard/"


@pytest.fixture
def server(monkeypatch):
    """A bucket, and retries that do not wait."""
    monkeypatch.setattr(object_storage, "FIRST_WAIT_SECONDS", 0.002)
    monkeypatch.setattr(object_storage, "LONGEST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(object_storage, "GIVE_UP_SECONDS", 1.0)
    quick = {"max_retries": 9, "initial_delay": "1ms", "max_delay": "4ms"}
    monkeypatch.setattr(shard_io, "BUCKET_RETRIES", quick)
    with FakeGCS() as running:
        yield running


def write(url=URL, size=20_000, seed=0):
    """A shard of one document, and its tokens."""
    ids = np.random.default_rng(seed).integers(1, 500, size - 1).astype(np.uint32)
    counts = token_shard.write_shard(url, [(ids, np.array([len(ids)]))], vocab_size=500, eos_id=0)
    return TokenShard(url, counts.tokens, counts.check), np.append(ids, 0)


def read(shard, starts, length):
    """Windows, by an array that has seen nothing yet."""
    with TokenArray([shard], 500) as array:
        return array.read(np.array(starts), length)


@pytest.mark.parametrize("kind", ["gs", "s3"])
def test_a_bucket_holds_the_files_that_a_disk_holds(kind, request, tmp_path):
    """Byte by byte, and the tokens, offsets and digest are read from either alike."""
    root = request.getfixturevalue("s3" if kind == "s3" else "server")
    there, tokens = write(storage.join(root, "shard") if kind == "s3" else URL)
    here, _ = write(str(tmp_path / "s"))
    names = [name for name, _ in storage.list_files(here.directory)]
    assert [name for name, _ in storage.list_files(there.directory)] == names
    for name in names:
        stored = storage.read_bytes(storage.join(there.directory, name))
        assert stored == (tmp_path / "s" / name).read_bytes()
    assert there.check == here.check
    assert token_shard.read_offsets(there.directory, there.check).tolist() == [0, 20_000]
    assert content_digest(there.directory) == content_digest(here.directory)
    for length in (1, 700, 1024, 2048, 19_000):
        starts = [0, 1024, 20_000 - length, 5] if length < 3000 else [0, 1000]
        expected = tokens[np.array(starts)[:, None] + np.arange(length)]
        assert np.array_equal(read(there, starts, length), expected)


def test_a_window_costs_its_own_bytes(server):
    """Aligned windows: two requests for the shard, and one range of just these chunks for each."""
    shard, _ = write()
    server.log.clear()
    sent = []
    get = server.get

    def watched(bucket, name, query):
        sent.append(name.removeprefix(KEY))
        return get(bucket, name, query)

    server.get = watched
    with TokenArray([shard], 500) as array:
        array.read(np.array([0, 8192]), 2048)
        assert sorted(sent) == ["checksums/c/0", *2 * ["tokens/c/0"], "tokens/zarr.json"]
        sent.clear()
        # Neighbours are one range.
        array.read(np.array([4096, 6144]), 2048)
        assert sent == ["tokens/c/0"]


def test_local_and_stored_shards_can_be_joined(server, tmp_path):
    """Windows cross from the one to the other."""
    (here, first), (there, second) = write(str(tmp_path / "s"), 3000, 1), write(size=5000, seed=2)
    every = np.concatenate([first, second, first])
    with TokenArray([here, there, here], 500) as array:
        starts = np.array([0, 2500, 7500, 4000])
        found = array.read(starts, 1024)
        assert np.array_equal(found, every[starts[:, None] + np.arange(1024)])
        assert np.array_equal(array.read(np.array([0]), len(every))[0], every)


def test_a_bucket_that_never_answers_is_a_storage_error(server):
    """After the retries, by name, for a shard that is new and for one that is open."""
    shard, tokens = write()
    with TokenArray([shard], 500) as array:
        array.read(np.array([0]), 10)
        server.faults = Faults(1.0, kinds=("503",))
        with pytest.raises(StorageError, match=URL):
            array.read(np.array([5000]), 10)
        with pytest.raises(StorageError, match=URL):
            read(shard, [0], 10)
        server.faults = Faults()
        assert np.array_equal(array.read(np.array([5000]), 10)[0], tokens[5000:5010])


def test_a_shard_in_a_bucket_is_never_overwritten(server):
    """A second writer fails and changes nothing."""
    write()
    before = dict(server.buckets["bucket"])
    with pytest.raises(StorageError, match="expected an empty directory"):
        write(seed=1)
    assert server.buckets["bucket"] == before


@pytest.mark.parametrize(
    ("probability", "kinds", "least"),
    [(0.3, ("503", "429", "500", "reset"), 7), (0.05, ("lost", "short", "503"), 2)],
)
def test_requests_that_fail_sometimes(server, probability, kinds, least):
    """The shard is sound, or another attempt is asked for: its own file looks like another's."""
    done = 0
    for seed in range(10):
        server.faults = Faults(probability, kinds=kinds, seed=seed)
        try:
            shard, tokens = write(f"{URL}-{seed}", seed=seed)
            done += 1
        except StoreUnavailable:
            continue
        if "lost" in kinds:
            server.faults = Faults()
        assert np.array_equal(read(shard, [0], 20_000)[0], tokens)
    # Which requests meet the faults depends on threads; most shards meet none that matters.
    assert done >= least
