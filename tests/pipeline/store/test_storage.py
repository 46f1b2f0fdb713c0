"""Storage: the contract of every kind of store, and what only a disk shows."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

import pytest

from pipeline.store import object_storage, storage
from tests.faults.fake_gcs import FakeGCS
from tests.faults.s3_server import s3

__all__ = ["s3"]


@pytest.fixture(params=["local", "memory", "gs", "s3"])
def root(request, tmp_path, monkeypatch):
    """A store to write to."""
    monkeypatch.setattr(object_storage, "FIRST_WAIT_SECONDS", 0.002)
    if request.param == "gs":
        with FakeGCS(page=3):
            yield "gs://bucket/store"
    elif request.param == "s3":
        yield f"{request.getfixturevalue('s3')}/store"
    else:
        yield str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def winners(action: Callable[[int], bool], threads: int = 8) -> list[int]:
    """The numbers of the threads, started together, for which the action returned True."""
    barrier, wins = threading.Barrier(threads), []

    def race(n: int) -> None:
        barrier.wait()
        if action(n):
            wins.append(n)

    running = [threading.Thread(target=race, args=(n,)) for n in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return wins


def test_create_writes_once_and_tells_who_won(root):
    """The content stays the first one's; of racing threads one creates."""
    url = storage.join(root, "a", "record.json")
    assert storage.create(url, b"first")
    assert not storage.create(url, b"first")
    for turn in range(4):
        url = storage.join(root, str(turn))
        (winner,) = winners(lambda n, url=url: storage.create(url, str(n).encode()))
        assert storage.read_bytes(url) == str(winner).encode()


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
    if root.startswith("gs://"):  # equal bytes written again are another version
        storage.write_atomic(url, b"one")
        version = storage.read_versioned(url)[1]
        storage.write_atomic(url, b"one")
        assert not storage.replace_if(url, b"two", version)


def test_of_racing_threads_one_replaces(root):
    """Those that read the same version, four times over."""
    url = storage.join(root, "manifest.json")
    storage.create(url, b"first")
    for turn in range(4):
        new = [f"{turn}-{n}".encode() for n in range(8)]
        version = storage.read_versioned(url)[1]
        (winner,) = winners(lambda n, v=version, new=new: storage.replace_if(url, new[n], v))
        assert storage.read_bytes(url) == new[winner]


def test_what_is_written_is_listed_with_its_size_until_it_is_deleted(root):
    """Neighbours with the same beginning stay, and a star is part of a name."""
    for name in ("d", "d*"):
        for n in range(5):
            storage.write_atomic(f"{root}/{name}/{n}/x", b"1" * n)
    storage.write_atomic(f"{root}/dd", b"old")
    storage.write_atomic(f"{root}/dd", b"abc")
    with storage.open_write(f"{root}/e/f") as file:
        file.write(b"333")
    assert storage.list_names(root) == ["d", "d*", "dd", "e"]
    assert storage.list_names(f"{root}/d") == [str(n) for n in range(5)]
    assert list(storage.list_files(f"{root}/d")) == [(f"{n}/x", n) for n in range(5)]
    sizes = {name: size for name, (size, _) in storage.inventory(f"{root}/e").items()}
    assert sizes == {"f": 3}
    assert storage.read_bytes(f"{root}/dd") == b"abc"
    storage.delete_tree(f"{root}/d*")
    storage.delete_tree(f"{root}/d*")
    assert storage.list_names(root) == ["d", "dd", "e"]
    storage.delete_tree(f"{root}/d")
    assert storage.list_names(root) == ["dd", "e"]


def test_what_is_absent(root):
    """None, False, empty or FileNotFoundError."""
    storage.write_atomic(f"{root}/there", b"")
    url = f"{root}/none"
    assert storage.size(url) is None
    assert storage.modified(url) is None
    assert not storage.exists(url)
    assert storage.list_names(url) == []
    assert list(storage.list_files(url)) == []
    assert storage.inventory(url) == {}
    storage.delete_tree(url)
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(url)
