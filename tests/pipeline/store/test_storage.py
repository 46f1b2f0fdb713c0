"""Storage: conditional create, atomic replace, safe paths; locally and in memory."""

from __future__ import annotations

import multiprocessing
import threading
import uuid

import pytest

from pipeline.store import storage


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    """A store to write to."""
    return str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def test_create_writes_once_and_tells_who_won(root):
    """Of two creates the second loses and the content stays the first one's."""
    url = storage.join(root, "a", "record.json")
    assert storage.create(url, b"first")
    assert not storage.create(url, b"second")
    assert storage.read_bytes(url) == b"first"


def test_of_racing_threads_one_creates(root):
    """Sixteen threads, one True."""
    url, wins = storage.join(root, "record"), []
    barrier = threading.Barrier(16)

    def race(n: int) -> None:
        barrier.wait()
        if storage.create(url, str(n).encode()):
            wins.append(n)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert storage.read_bytes(url) == str(wins[0]).encode()


def _race_process(directory: str, barrier, wins) -> None:
    for round_ in range(20):
        barrier.wait()
        if storage.create(f"{directory}/{round_}", b"x" * 4096):
            wins.put(round_)


def test_of_racing_processes_one_creates(tmp_path):
    """Two processes, twenty races, twenty winners."""
    context = multiprocessing.get_context("spawn")
    barrier, wins = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_race_process, args=(str(tmp_path), barrier, wins)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert sorted(wins.get() for _ in range(20)) == list(range(20))
    assert wins.empty()


def test_write_atomic_replaces_and_leaves_nothing_behind(tmp_path):
    """The new content is there and no temporary file is."""
    url = str(tmp_path / "x")
    storage.write_atomic(url, b"old")
    storage.write_atomic(url, b"new")
    assert storage.read_bytes(url) == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_listing_and_sizes(root):
    """Names directly below, files recursively with sizes; absent directories are empty."""
    storage.write_atomic(storage.join(root, "b", "c"), b"123")
    storage.write_atomic(storage.join(root, "a"), b"1")
    assert storage.list_names(root) == ["a", "b"]
    assert list(storage.list_files(root)) == [("a", 1), ("b/c", 3)]
    assert storage.list_names(storage.join(root, "none")) == []
    assert list(storage.list_files(storage.join(root, "none"))) == []
    assert storage.size(storage.join(root, "b", "c")) == 3
    assert storage.size(storage.join(root, "none")) is None


def test_digest_is_sha256(root):
    """The digest of a known content."""
    url = storage.join(root, "abc")
    storage.write_atomic(url, b"abc")
    assert storage.sha256(url) == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def test_a_replacement_needs_the_version_that_was_read(root):
    """An object that changed since, or is gone, is not replaced or deleted."""
    url = storage.join(root, "manifest.json")
    storage.create(url, b"one")
    data, version = storage.read_versioned(url)
    assert data == b"one"
    assert storage.replace_if(url, b"two", version)
    assert not storage.replace_if(url, b"three", version)
    assert not storage.replace_if(url, None, version)
    assert storage.read_bytes(url) == b"two"
    assert storage.replace_if(url, None, storage.read_versioned(url)[1])
    assert not storage.replace_if(url, b"four", version)
    assert not storage.exists(url)


def test_of_racing_threads_one_replaces(root):
    """Sixteen threads that read the same version, eight times over: one True each time."""
    url = storage.join(root, "manifest.json")
    storage.create(url, b"first")
    for turn in range(8):
        version, barrier, wins = storage.read_versioned(url)[1], threading.Barrier(16), []

        def race(n: int, turn=turn, version=version, barrier=barrier, wins=wins) -> None:
            barrier.wait()
            if storage.replace_if(url, f"{turn}-{n}".encode(), version):
                wins.append(n)

        threads = [threading.Thread(target=race, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = wins
        assert storage.read_bytes(url) == f"{turn}-{winner}".encode()
