"""Storage on s3://: the same promises as on a disk, from a server that keeps S3's conditions."""

from __future__ import annotations

import pytest

from pipeline.errors import InputError, StoreUnavailable
from pipeline.store import storage
from pipeline.store.write_check import check_writable
from tests.faults.s3_server import s3

__all__ = ["s3"]


def failing(monkeypatch, times: int, *, after: bool, method: str = "put_object") -> list[str]:
    """The first `times` requests of a kind lose their connection, before or after they took effect.

    Returns:
        Methods of all requests, as they are made.
    """
    from s3fs import S3FileSystem

    real, made = S3FileSystem._call_s3, []

    async def call(self, name, *args, **kwargs):
        made.append(name)
        lost = name == method and made.count(method) <= times
        if lost and not after:
            raise ConnectionResetError("reset")
        found = await real(self, name, *args, **kwargs)
        if lost:
            raise ConnectionResetError("reset")
        return found

    monkeypatch.setattr(S3FileSystem, "_call_s3", call)
    return made


def test_a_write_whose_answer_is_lost_is_known_for_ours(s3, monkeypatch):
    """The object was written, the connection broke, and the second request is refused by it."""
    made = failing(monkeypatch, 1, after=True)
    url = storage.join(s3, "record")
    assert storage.create(url, b"first")
    assert made.count("put_object") == 2
    monkeypatch.undo()


def test_a_connection_that_breaks_is_made_again(s3, monkeypatch):
    """Three times for one write; one that breaks for good is given up, naming the object."""
    failing(monkeypatch, 3, after=False)
    url = storage.join(s3, "record")
    storage.write_atomic(url, b"first")
    assert storage.read_bytes(url) == b"first"
    monkeypatch.undo()


def test_a_store_that_stays_broken_is_given_up(s3, monkeypatch):
    """Within the seconds that are allowed, naming the object."""
    failing(monkeypatch, 10_000, after=False)
    with (
        storage.giving_up_after(0.05),
        pytest.raises(StoreUnavailable, match=r"s3://bucket/record: .* times"),
    ):
        storage.write_atomic(storage.join(s3, "record"), b"first")
    monkeypatch.undo()


def test_a_bucket_that_is_not_there_is_a_mistake(s3):
    """Refused before any work, and not made."""
    check_writable(storage.join(s3, "store"))
    with pytest.raises(InputError, match="there is no bucket 'absent'"):
        check_writable("s3://absent/store")
    assert storage.list_names(s3) == []


def test_without_a_login_it_is_refused(s3, monkeypatch):
    """At once, naming what to set."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    type(storage.filesystem(s3)[0]).clear_instance_cache()
    with pytest.raises(InputError, match=r"not permitted .*AWS_ACCESS_KEY_ID"):
        check_writable(storage.join(s3, "store"))
