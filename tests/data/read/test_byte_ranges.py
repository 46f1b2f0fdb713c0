"""Byte ranges of remote files: exact, tried again, of one file throughout, and nothing told."""

import io
import os
import random
import re
import time
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.read import byte_ranges, retry
from data.read.byte_ranges import FileState, RangeFile, file_state, open_ranges
from data.read.listing import find_files
from data.read.retry import NotThere
from pipeline.errors import InputError, StorageError, StoreUnavailable
from pipeline.store import storage
from tests.faults.fake_gcs import FakeGCS
from tests.faults.fake_hub import PASSING, FakeHub, Faults
from tests.faults.hub import quick_retries

BROKEN = tuple(kind for kind in PASSING if kind != "short")
CONTENT = random.Random(0).randbytes(300_000)


@pytest.fixture
def hub():
    """A hub with one file and a second of another folder."""
    with FakeHub({"data/x.parquet": CONTENT, "more/y.parquet": b"y"}) as server, quick_retries():
        yield server


def places(server):
    """The same file by each protocol of the fake hub."""
    return [f"{server.source}/data/x.parquet", server.web("data/x.parquet")]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 200),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("seek"), st.integers(0, 250), st.just(io.SEEK_SET)),
            st.tuples(st.just("seek"), st.integers(-50, 50), st.sampled_from([1, 2])),
            st.tuples(st.just("read"), st.integers(-1, 250), st.just(0)),
        ),
        max_size=12,
    ),
)
def test_it_reads_as_bytesio_does(size, steps):
    """Any seeks and reads give what they give on the bytes themselves."""
    data = random.Random(size).randbytes(size)
    ours = RangeFile("x", FileState(size), lambda start, stop, left: data[start:stop])
    theirs = io.BytesIO(data)
    for kind, number, whence in steps:
        if kind == "read":
            assert ours.read(number) == theirs.read(number)
        else:
            base = {0: 0, 1: theirs.tell(), 2: size}[whence]
            if base + number < 0:
                with pytest.raises(ValueError, match="before start"):
                    ours.seek(number, whence)
            else:
                assert ours.seek(number, whence) == theirs.seek(base + number)
        assert ours.tell() == theirs.tell()


def test_a_long_read_is_made_of_pieces(monkeypatch):
    """One failure costs a piece again and not the whole read."""
    monkeypatch.setattr(byte_ranges, "_PIECE", 7)
    asked = []

    def fetch(start, stop, left):
        asked.append((start, stop))
        return CONTENT[start:stop]

    file = RangeFile("x", FileState(30), fetch)
    assert file.read() == CONTENT[:30]
    assert asked == [(0, 7), (7, 14), (14, 21), (21, 28), (28, 30)]


def test_exactly_what_is_read_is_fetched(hub):
    """The server sees the range that was read, and one request for it."""
    for place in places(hub):
        state = file_state(place)
        hub.log.clear()
        with open_ranges(place, state) as file:
            file.seek(1000)
            assert file.read(500) == CONTENT[1000:1500]
        assert hub.ranges_of("data/x.parquet") == [(1000, 1500)]
        assert len(hub.log) == 1


@pytest.mark.parametrize("kind", ["429", "429 wait", "500", "503", "reset", "torn", "cut", "short"])
def test_what_passes_is_tried_again(hub, kind):
    """Half of the requests fail in one way: the bytes are right, and it did fail."""
    hub.faults = Faults(0.5, (kind,), seed=1)
    for place in places(hub):
        state = file_state(place)
        with open_ranges(place, state) as file:
            pieces = [file.read(20_000) for _ in range(15)]
        assert b"".join(pieces) == CONTENT
    assert hub.injected() > 5


def test_nothing_is_tried_more_often_than_we_ask(hub, monkeypatch):
    """A read that always fails is sent as often as `TRIES` says: no client tries inside of ours."""
    monkeypatch.setattr(retry, "TRIES", 4)
    for place in places(hub):
        with open_ranges(place) as file:
            hub.faults = Faults(1.0, ("503",))
            hub.log.clear()
            with pytest.raises(StoreUnavailable, match=r"bytes 0-9: failed 4 times.*HTTP 503"):
                file.read(10)
            assert len(hub.log) == 4
        hub.faults = Faults()


@pytest.mark.parametrize(("kind", "error"), [("401", InputError), ("404", NotThere)])
def test_what_does_not_pass_is_not_tried_again(hub, kind, error):
    """One request, and what to do about it."""
    for place in places(hub):
        with open_ranges(place) as file:
            hub.faults = Faults(1.0, (kind,))
            hub.log.clear()
            with pytest.raises(error, match=rf"HTTP {kind}|not found") as caught:
                file.read(10)
            assert len(hub.log) == 1
            assert "data/x.parquet" in str(caught.value)
            assert ("HF_TOKEN" in str(caught.value)) == place.startswith("hf://")
        hub.faults = Faults()


@pytest.mark.slow
def test_retry_after_is_honoured(hub):
    """No request before the time that the server asked for, and none after the patience ends."""
    hub.faults = Faults(1.0, ("429 wait",), retry_after=1)
    place = places(hub)[0]
    with quick_retries(patience=1.5), open_ranges(place, FileState(len(CONTENT))) as file:
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"failed 2 times.*asks to wait 1 s"):
            file.read(10)
        assert time.monotonic() - begun >= 1
    hub.faults = Faults(1.0, ("429 wait",), retry_after=3600)
    hub.log.clear()
    with (
        open_ranges(place, FileState(len(CONTENT))) as file,
        pytest.raises(StoreUnavailable, match="asks to wait 3600 s"),
    ):
        file.read(10)
    assert len(hub.log) == 1


def test_an_offline_client_is_said_at_once(hub, monkeypatch):
    """It would stay offline however long we wait."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        find_files(places(hub)[0])


@pytest.mark.parametrize("place", ["hf", "https", "gs", "local"])
def test_a_file_that_changes_is_refused(place, tmp_path, hub):
    """Other bytes of the same length, between two reads or before the first, are an InputError."""
    new = CONTENT[::-1]
    with FakeGCS():
        if place == "gs":
            url = "gs://bucket/x.parquet"
            storage.write_atomic(url, CONTENT)
        elif place == "local":
            url = str(tmp_path / "x.parquet")
            storage.write_atomic(url, CONTENT)
            os.utime(url, ns=(0, 0))
        else:
            url = places(hub)[place == "https"]
        state = file_state(url)
        assert state.version
        with open_ranges(url, state) as file:
            assert file.read(10) == CONTENT[:10]
            if place in ("hf", "https"):
                hub.files["data/x.parquet"] = new
            else:
                storage.write_atomic(url, new)
            if place != "local":  # a local file that was replaced is still open
                file.seek(100_000)
                with pytest.raises(InputError, match=r"x\.parquet: the source changed"):
                    file.read(10)
        with pytest.raises(InputError, match=r"x\.parquet: the source changed"):
            open_ranges(url, state).read(10)


def test_a_file_that_shrinks_or_grows_is_refused(hub):
    """Also where its tag is the same."""
    for place in places(hub):
        for size in (1000, len(CONTENT) + 1000):
            with open_ranges(place, FileState(size)) as file:
                if size < len(CONTENT) and place.startswith("http"):
                    continue  # http says a size only with its tag
                file.seek(size - 10)
                with pytest.raises(InputError, match="changed"):
                    file.read(10)


def test_a_server_without_ranges_is_refused():
    """Before whole files are fetched again and again."""
    with FakeHub({"x.parquet": CONTENT}, ranges=False) as server:
        with (
            open_ranges(server.web("x.parquet")) as file,
            pytest.raises(InputError, match="no ranges"),
        ):
            file.read(10)
        assert len(server.ranges_of("x.parquet")) == 1


def test_find_lists_files_with_size_and_version(hub, tmp_path):
    """By each protocol: the files that match, by name, and no folder."""
    (tmp_path / "a.parquet").write_bytes(b"abc")
    (tmp_path / "b.parquet").mkdir()
    (name, state), *rest = find_files(f"{tmp_path}/*.parquet")
    assert (name, state.size, rest) == (str(tmp_path / "a.parquet"), 3, [])
    assert [name for name, _ in find_files(f"{hub.source}/*/*.parquet")] == [
        f"{hub.source}/data/x.parquet",
        f"{hub.source}/more/y.parquet",
    ]
    for place in places(hub):
        assert find_files(place) == [(place, file_state(place))]
        assert [name for name, _ in find_files(place.replace("x.parq", "*.parq"))] == [place]
        with pytest.raises(InputError, match=r"no file matches|found none"):
            find_files(place.replace("x.parq", "z*.parq"))
        with pytest.raises(InputError, match=r"no file matches|found none"):
            find_files(place.replace("x.parq", "z.parq"))


@pytest.mark.parametrize(
    "source",
    [
        "hf://datasets/owner/other@main/*.parquet",
        "hf://datasets/owner/name@other/*.parquet",
        "hf://datasets/owner/name@main/nothing/*.parquet",
        "hf://datasets/name",
    ],
)
def test_an_address_that_is_none_is_refused_at_once(hub, source):
    """No such repository, revision or folder, no address at all, a folder."""
    with pytest.raises(InputError, match=r"hf://|datasets/"):
        find_files(source)
    assert len(hub.log) < 8


@pytest.mark.parametrize("redirect", [False, True])
def test_a_private_repository_says_how_to_log_in(monkeypatch, redirect):
    """Without a token the message names HF_TOKEN; with the right one it reads; no token is told."""
    token = "hf_" + "secret" * 5
    with FakeHub({"x.parquet": CONTENT}, token=token, redirect=redirect) as server, quick_retries():
        source = f"{server.source}/*.parquet"
        for wrong in ("", "hf_" + "wrong" * 6):
            monkeypatch.setenv("HF_TOKEN", wrong)
            with pytest.raises(InputError, match="HF_TOKEN") as error:
                find_files(source)
            assert not wrong or wrong not in str(error.value)
        monkeypatch.setenv("HF_TOKEN", token)
        ((url, state),) = find_files(source)
        with open_ranges(url, state) as file:
            assert file.read() == CONTENT
            server.faults = Faults(1.0, ("503",), only="cdn" if redirect else "resolve")
            monkeypatch.setattr(retry, "TRIES", 2)
            file.seek(5)
            file._kept = (0, b"")
            with pytest.raises(StorageError) as failed:
                file.read(5)
        told = repr(failed.value) + repr(failed.value.__cause__) + repr(failed.value.__context__)
        assert "secret" not in told
        assert "ignature" not in told


def test_a_login_in_an_address_is_refused():
    """It would stand in every record."""
    with pytest.raises(InputError, match="login") as error:
        find_files("https://user:password@host/x.parquet")
    assert "password" not in str(error.value)


@pytest.mark.slow
def test_a_listing_that_fails_is_never_an_empty_one(hub):
    """Whatever client swallows errors: listed in full or a StorageError, at any rate of faults."""
    for place in (f"{hub.source}/data/*.parquet", *places(hub), hub.web("data/*.parquet")):
        for seed in range(5):
            # Of a page of HTML nobody can tell that it was longer.
            kinds = PASSING if place.startswith("hf://") else BROKEN
            hub.faults = Faults(0.6, kinds, seed=seed)
            assert [name.rpartition("/")[2] for name, _ in find_files(place)] == ["x.parquet"]
        hub.faults = Faults(1.0, ("503", "reset"))
        with quick_retries(patience=0.2), pytest.raises(StorageError):
            find_files(place)


@pytest.mark.parametrize("what", ["tree", "resolve", "web"])
def test_a_server_that_falls_silent_is_given_up(hub, what):
    """In the time that was set, also where the client itself would wait for ever."""
    url = places(hub)[what == "web"]
    state = file_state(url)
    hub.faults = Faults(1.0, ("slow",), only=what, slow_seconds=5)
    read = open_ranges(url, state).read
    attempt = (
        partial(find_files, f"{hub.source}/data/*.parquet") if what == "tree" else partial(read, 9)
    )
    with quick_retries(patience=0.4), pytest.raises(StorageError, match="failed"):
        attempt()


def test_long_listings_come_in_pages():
    """All pages are followed, and a failing page is asked again."""
    files = {f"data/{n:03d}.parquet": b"x" for n in range(57)}
    with FakeHub(files, page=10) as server, quick_retries():
        server.faults = Faults(0.3, seed=3)
        found = find_files(f"{server.source}/**/*.parquet")
    assert [re.sub(".*/data", "data", name) for name, _ in found] == sorted(files)
