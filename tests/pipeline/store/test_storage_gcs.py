"""Storage on Google Cloud Storage: gcsfs's own requests, to a server that counts them."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from pipeline.errors import InputError, PonenteError, StorageError, StoreUnavailable
from pipeline.store import object_storage, storage, write_check
from pipeline.store.google_storage import GoogleStorage
from pipeline.store.write_check import check_writable
from tests.faults.fake_gcs import FakeGCS, Faults

ROOT = "gs://bucket/store"


@pytest.fixture
def server(monkeypatch) -> Iterator[FakeGCS]:
    """A bucket, and retries that do not wait."""
    monkeypatch.setattr(object_storage, "FIRST_WAIT_SECONDS", 0.002)
    monkeypatch.setattr(object_storage, "LONGEST_WAIT_SECONDS", 0.01)
    with FakeGCS(page=3) as running:
        yield running


def writes(server: FakeGCS) -> list[dict[str, str]]:
    """Queries of the uploads the server saw, in order."""
    return [query for method, path, query, _ in server.log if "/upload/" in path]


def contents(server: FakeGCS) -> dict[str, bytes]:
    """What the bucket holds, seen from the server."""
    return {name: stored.data for name, stored in server.buckets["bucket"].items()}


def call(server: FakeGCS, method: str, path: str, body: bytes = b"", **headers: str) -> int:
    """Status of one request without any client library."""
    request = urllib.request.Request(server.root + path, body, headers, method=method)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


# The server itself: a precondition that it did not enforce would make every race below vacuous.


def test_the_server_enforces_preconditions_on_every_kind_of_write(server):
    """A second create is refused as media, as multipart and at both ends of a resumable upload."""
    upload = "/upload/storage/v1/b/bucket/o"
    media = f"{upload}?uploadType=media&name=x&ifGenerationMatch=0"
    assert [call(server, "POST", media, b"1"), call(server, "POST", media, b"2")] == [200, 412]
    about = json.dumps({"name": "x"}).encode()
    parts = b"--b\r\n\r\n" + about + b"\r\n--b\r\n\r\n3\r\n--b--"
    kind = {"Content-Type": "multipart/related; boundary=b"}
    multipart = f"{upload}?uploadType=multipart&ifGenerationMatch=0"
    assert call(server, "POST", multipart, parts, **kind) == 412
    resumable = f"{upload}?uploadType=resumable&name=x&ifGenerationMatch=0"
    assert call(server, "POST", resumable, b"{}") == 412
    location = server.begin("bucket", "y", {"ifGenerationMatch": "0"}, {}).removeprefix(server.root)
    server.put("bucket", "y", b"first", {}, {})
    assert call(server, "PUT", location, b"late", **{"Content-Range": "bytes 0-3/4"}) == 412
    generation = server.buckets["bucket"]["y"].generation
    one = "/storage/v1/b/bucket/o/y?ifGenerationMatch="
    assert call(server, "DELETE", one + str(generation - 1)) == 412
    assert contents(server) == {"x": b"1", "y": b"first"}
    assert call(server, "DELETE", one + str(generation)) == 204


# create


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 51 << 20])
def test_create_is_conditional_whatever_the_size(server, size):
    """Every upload of a create carries the precondition, and the second create loses."""
    url, data = f"{ROOT}/record", bytes(size)
    assert storage.create(url, data)
    assert not storage.create(url, b"other")
    sent = writes(server)
    assert len(sent) == 2
    assert all(query["ifGenerationMatch"] == "0" for query in sent)
    assert contents(server) == {"store/record": data}


def test_a_create_whose_answer_was_lost_is_ours(server):
    """Stored, reset, sent again, refused: that refusal is recognised as our own success."""
    server.faults = Faults(lose=1)
    assert storage.create(f"{ROOT}/record", b"mine")
    assert [status for *_, status in server.log[:2]] == [0, 412]
    assert not storage.create(f"{ROOT}/record", b"mine")  # equal bytes, another writer
    server.put("bucket", "store/foreign", b"mine", {}, {})
    assert not storage.create(f"{ROOT}/foreign", b"mine")  # and one without our mark


# the rest of storage.py


@pytest.mark.parametrize("size", [0, 5 << 20, (11 << 20) + 3])
def test_files_written_and_read_in_pieces(server, size):
    """Small files and resumable uploads hold what was written, and are read at any place."""
    data = bytes(n % 251 for n in range(1 << 16)) * (size // (1 << 16) + 1)
    data = data[:size]
    with storage.open_write(f"{ROOT}/file") as file:
        for start in range(0, size, 700_001):
            file.write(data[start : start + 700_001])
    assert contents(server) == {"store/file": data}
    with storage.open_read(f"{ROOT}/file") as file:
        file.seek(size // 2)
        assert file.read() == data[size // 2 :]


def test_nothing_is_answered_from_a_cache(server):
    """What another process wrote or deleted after we listed is seen by every question at once."""
    storage.write_atomic(f"{ROOT}/d/a", b"1")
    fs, path = storage.filesystem(f"{ROOT}/d")
    assert storage.list_names(f"{ROOT}/d") == ["a"]
    assert [name for name, _ in storage.list_files(ROOT)] == ["d/a"]
    fs.ls(path)
    server.put("bucket", "store/d/b", b"22", {}, {})
    server.delete("bucket", "store/d/a", {})
    assert storage.size(f"{ROOT}/d/b") == 2
    assert storage.size(f"{ROOT}/d/a") is None
    fs.ls(path)
    server.put("bucket", "store/d/c", b"333", {}, {})
    with storage.open_read(f"{ROOT}/d/c") as file:
        assert file.read() == b"333"
    assert storage.list_names(f"{ROOT}/d") == ["b", "c"]


@pytest.mark.parametrize("batch", [False, True])
def test_delete_tree_deletes_what_is_below_and_nothing_else(server, batch, monkeypatch):
    """Neighbours with the same beginning stay; one by one, and batched as on the real service."""
    monkeypatch.setattr(GoogleStorage, "on_google", property(lambda _: batch))
    for name in ("d/1", "d/e/2", "d/e/3", "dd/4", "d5", "e"):
        storage.write_atomic(f"{ROOT}/{name}", b"")
    storage.delete_tree(f"{ROOT}/d")
    assert sorted(contents(server)) == ["store/d5", "store/dd/4", "store/e"]
    assert any("/batch/" in path for _, path, *_ in server.log) == batch


# errors


OPERATIONS = {
    "create": lambda: storage.create(f"{ROOT}/x", b"1"),
    "write_atomic": lambda: storage.write_atomic(f"{ROOT}/x", b"1"),
    "read_bytes": lambda: storage.read_bytes(f"{ROOT}/x"),
    "list_names": lambda: storage.list_names(f"{ROOT}/x"),
    "list_files": lambda: list(storage.list_files(f"{ROOT}/x")),
    "size": lambda: storage.size(f"{ROOT}/x"),
    "exists": lambda: storage.exists(f"{ROOT}/x"),
    "delete_tree": lambda: storage.delete_tree(f"{ROOT}/x"),
    "check_writable": lambda: check_writable(f"{ROOT}/x"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(OPERATIONS, ["503"]),
        *itertools.product(["read_bytes"], ["lost", "short", "429", "500", "reset"]),
    ],
)
def test_a_store_that_is_down_is_a_transient_error_naming_the_url(server, monkeypatch, name, kind):
    """Every operation gives up, with an error that is ours, that is an OSError, with the URL."""
    server.put("bucket", "store/x", b"1", {}, {})
    monkeypatch.setattr(object_storage, "GIVE_UP_SECONDS", 0.05)
    monkeypatch.setattr(write_check, "_CHECK_SECONDS", 0.05)
    server.faults = Faults(1.0, kinds=(kind,))
    with pytest.raises(StoreUnavailable, match=ROOT) as raised:
        OPERATIONS[name]()
    assert isinstance(raised.value, OSError)
    assert isinstance(raised.value, StorageError)
    assert not isinstance(raised.value, FileNotFoundError)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_denied_bucket_is_refused_input_at_once(server, name):
    """403 is not tried again, and says what to do."""
    server.denied.add("bucket")
    with pytest.raises(InputError, match=f"{ROOT}.*not permitted.*log in"):
        OPERATIONS[name]()
    assert len(server.log) <= 2


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"read_bytes"}))
def test_a_missing_bucket_is_refused_input(server, name):
    """Nothing but reading takes a missing bucket for a missing object."""
    server.buckets.clear()
    with pytest.raises(InputError, match="no bucket 'bucket'"):
        OPERATIONS[name]()


def test_a_failed_upload_leaves_no_view_of_its_buffer(server, monkeypatch):
    """The collector of some Pythons crashes on a buffer that it ends before its views."""
    monkeypatch.setattr(object_storage, "GIVE_UP_SECONDS", 0.05)
    file = storage.open_write(f"{ROOT}/file")
    file.write(bytes(6_000_000))
    server.faults = Faults(1.0, kinds=("503",))
    with pytest.raises(StoreUnavailable) as failure:
        file.write(bytes(6_000_000))
    assert failure.tb is not None, "which has the variables of gcsfs"
    file.buffer.seek(0, 2)
    file.buffer.write(bytes(9_000_000))  # a BufferError while a view of it lives
    file.closed = True


def test_a_file_being_read_fails_as_ours(server, monkeypatch):
    """The error is translated also where gcsfs's file object makes the request."""
    storage.write_atomic(f"{ROOT}/x", bytes(100))
    monkeypatch.setattr(object_storage, "GIVE_UP_SECONDS", 0.05)
    with storage.open_read(f"{ROOT}/x") as file:
        server.faults = Faults(1.0, kinds=("503",))
        with pytest.raises(StoreUnavailable, match=f"{ROOT}/x"):
            file.read(10)


def test_short_and_slow_bodies_are_read_whole(server):
    """A body cut short is asked for again, never taken for the object."""
    data = bytes(range(256)) * 4096
    storage.write_atomic(f"{ROOT}/x", data)
    server.faults = Faults(0.7, kinds=("short", "slow"), seed=3)
    for _ in range(10):
        assert storage.read_bytes(f"{ROOT}/x") == data


# check_writable


def test_check_writable_leaves_nothing_behind(server, tmp_path):
    """A store that can be written passes, and holds nothing afterwards."""
    check_writable(ROOT)
    check_writable(str(tmp_path / "new"))
    check_writable("memory://check-writable")
    assert contents(server) == {}
    assert list((tmp_path / "new").iterdir()) == []
    assert storage.list_names("memory://check-writable") == []


def test_check_writable_names_a_file_in_the_way(tmp_path):
    """A prefix that is a file, or lies below one."""
    (tmp_path / "file").write_text("")
    for prefix in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="expected a directory"):
            check_writable(str(prefix))


def test_check_writable_tells_a_quota(server, monkeypatch):
    """A store that answers 429 to every write is told as such."""
    monkeypatch.setattr(write_check, "_CHECK_SECONDS", 0.05)
    server.over_quota.add("bucket")
    with pytest.raises(PonenteError, match="quota"):
        check_writable(ROOT)
