"""Files of trackers: uploaded whole, and made up for when a store failed."""

import shutil

import pytest

from pipeline.errors import InputError, StoreUnavailable
from pipeline.store import storage
from training.metrics.trackers import Spool

NAME = "events"


class Ticks:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self):
        return self.now


def test_on_an_object_store_the_file_is_uploaded_whole_now_and_then():
    """Nothing before its time, all of it at its time and at the end; the local copy goes."""
    clock = Ticks()
    spool = Spool("memory://spool/run", clock)
    path = spool.path / "events"
    path.write_text("1\n")
    spool.sync()
    url = "memory://spool/run/events"
    assert storage.size(url) is None
    clock.now += 31
    spool.sync()
    assert storage.read_bytes(url) == b"1\n"
    path.write_text("1\n2\n")
    spool.sync()
    assert storage.read_bytes(url) == b"1\n"
    spool.close()
    assert storage.read_bytes(url) == b"1\n2\n"
    assert not spool.path.exists()


class Store:
    """`memory://`, which fails as often as it is told to."""

    def __init__(self, monkeypatch, error=None):
        self.write, self.error, self.failures = storage.write_atomic, error, 0
        monkeypatch.setattr(storage, "write_atomic", self)

    def __call__(self, url, data):
        if self.failures:
            self.failures -= 1
            raise self.error or StoreUnavailable(f"{url}: 503")
        self.write(url, data)


def test_a_store_that_fails_is_tried_again_and_given_up_at_the_end(monkeypatch, caplog):
    """An upload that failed is made up for by the next; at the end the local copy is left."""
    store, clock = Store(monkeypatch), Ticks()
    spool = Spool("memory://gone/run", clock)
    (spool.path / NAME).write_text("1\n")
    for store.failures in (1, 0):
        clock.now += 31
        spool.sync()
    assert storage.read_bytes(f"memory://gone/run/{NAME}") == b"1\n"
    assert caplog.text.count("will be retried") == 1
    (spool.path / NAME).write_text("1\n2\n")
    store.failures = 1
    with pytest.raises(StoreUnavailable):
        spool.close()
    assert (spool.path / NAME).read_text() == "1\n2\n"
    shutil.rmtree(spool.path)


def test_what_is_not_permitted_ends_it_at_once(monkeypatch):
    """No later try can do better."""
    store, clock = Store(monkeypatch, InputError("not permitted")), Ticks()
    spool = Spool("memory://refused/run", clock)
    (spool.path / NAME).write_text("1\n")
    clock.now, store.failures = 31, 1
    with pytest.raises(InputError):
        spool.sync()
    shutil.rmtree(spool.path)
