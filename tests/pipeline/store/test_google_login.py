"""The login that a process has with Google Cloud Storage, and how it finds another."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec.config
import google.auth
import google.oauth2.credentials
import pytest

from pipeline.errors import InputError
from pipeline.store import google_storage, storage
from pipeline.store.google_storage import GoogleStorage
from tests.faults.fake_gcs import FakeGCS

ROOT = "gs://bucket/store"


@pytest.fixture
def server() -> Iterator[FakeGCS]:
    """A bucket."""
    with FakeGCS() as running:
        yield running


@pytest.fixture
def searches(server, monkeypatch) -> Iterator[list[Exception | None]]:
    """Answers of Google's search for a login, by turns; the bucket takes requests with one only."""
    answers: list[Exception | None] = []

    def search(scopes):
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return google.oauth2.credentials.Credentials("token"), "project"

    server.private = True
    google_storage._credentials.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(google.auth, "default", search)
        patch.setitem(fsspec.config.conf, "gs", {"endpoint_url": server.root})
        patch.delenv("STORAGE_EMULATOR_HOST")
        GoogleStorage.clear_instance_cache()
        yield answers
    google_storage._credentials.cache_clear()
    GoogleStorage.clear_instance_cache()


BUSY = google.auth.exceptions.DefaultCredentialsError("the metadata server is busy")


@pytest.mark.parametrize("answers", [[None], [BUSY, None]])
def test_a_search_for_a_login_that_failed_is_repeated(server, searches, answers):
    """A process that began while the metadata server was busy is not anonymous for ever."""
    searches += answers
    storage.write_atomic(f"{ROOT}/x", b"1")
    assert storage.read_bytes(f"{ROOT}/x") == b"1"
    assert searches == []


def test_a_login_that_was_replaced_is_found_after_a_refusal(server, searches):
    """The user logs in again while the process runs."""
    searches += [None, None]
    storage.filesystem(ROOT)[0].credentials.credentials = None  # one that is accepted no longer
    storage.write_atomic(f"{ROOT}/x", b"1")
    assert searches == []


def test_without_any_login_a_private_bucket_is_refused(server, searches):
    """At once, with what to do."""
    searches += [BUSY, BUSY]
    with pytest.raises(InputError, match=r"not permitted.*log in"):
        storage.write_atomic(f"{ROOT}/x", b"1")
    assert len(server.log) == 1
