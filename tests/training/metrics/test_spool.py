"""Files of trackers: uploaded whole, and made up for when a store failed."""

import shutil

import pytest

from pipeline.errors import InputError, StoreUnavailable
from pipeline.store import storage
from training.metrics.spool import Spool

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


@pytest.mark.parametrize("error", [StoreUnavailable("503"), InputError("not permitted")])
def test_a_store_that_fails_for_good_is_given_up_at_the_end(monkeypatch, error):
    """The copy on this machine is left, with everything; what is not permitted ends it at once."""
    store, clock = Store(monkeypatch, error), Ticks()
    spool = Spool("memory://gone/run", clock, pause=lambda seconds: None)
    (spool.path / NAME).write_text("1\n")
    store.failures = 10**6
    clock.now += 31
    if isinstance(error, InputError):
        with pytest.raises(InputError):
            spool.sync()
    else:
        spool.sync()
    with pytest.raises(type(error)):
        spool.close()
    assert (spool.path / NAME).read_text() == "1\n"
    shutil.rmtree(spool.path)
