"""Whole-file checksums: what a publisher says, and every flipped bit found."""

import hashlib
import random

import pytest

from data.read.sha256sums import expected_checksum, verify_file
from data.source import python_documentation
from pipeline.errors import InputError
from pipeline.store import storage
from tests.faults.fake_gcs import FakeGCS
from tests.faults.fake_hub import FakeHub, Faults
from tests.faults.hub import quick_retries

DATA = random.Random(0).randbytes(40_000)
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(params=["local", "gs", "https", "hf"])
def place(request, tmp_path):
    """(url, function that replaces the file) with the checksum published beside or by the store."""
    sums = f"{'0' * 64}  other.parquet\n{DIGEST.upper()} *./x.parquet\n\n".encode()
    files = {"d/x.parquet": DATA, "d/SHA256SUMS": sums}
    with FakeHub(files) as hub, FakeGCS(), quick_retries():
        root = {"local": str(tmp_path), "gs": "gs://bucket", "https": hub.web("").rstrip("/")}
        if request.param in ("local", "gs"):
            for name, data in files.items():
                storage.write_atomic(f"{root[request.param]}/{name}", data)
        url = f"{root.get(request.param, hub.source)}/d/x.parquet"

        def replace(data):
            if request.param in ("local", "gs"):
                storage.write_atomic(url, data)
            else:
                hub.files["d/x.parquet"] = data

        yield url, replace


def test_the_published_checksum_is_found_and_holds(place):
    """By the hub's listing, or by SHA256SUMS beside the file."""
    url, _ = place
    assert expected_checksum(url) == DIGEST
    verify_file(url, DIGEST)
    verify_file(url, DIGEST.upper())


def test_another_content_is_refused_with_both_digests(place):
    """The message has the file, what was expected and what was found."""
    url, replace = place
    other = DATA[:-1] + b"\0"
    expected = expected_checksum(url)
    replace(other)
    if url.startswith("hf://"):
        with pytest.raises(InputError, match=r"x\.parquet: the source changed"):
            verify_file(url, expected)
        return
    with pytest.raises(InputError, match=r"x\.parquet") as error:
        verify_file(url, expected)
    assert DIGEST in str(error.value)
    assert hashlib.sha256(other).hexdigest() in str(error.value)


def test_bits_that_flip_on_the_way_are_found():
    """The hub sends other bytes than it lists: every such reading is refused."""
    with FakeHub({"x.parquet": DATA}) as hub:
        url = f"{hub.source}/x.parquet"
        expected = expected_checksum(url)
        hub.faults = Faults(1.0, ("flip",))
        for _ in range(20):
            with pytest.raises(InputError, match=expected):
                verify_file(url, expected)


@pytest.mark.parametrize("place", ["local", "gs", "https", "embedded", "hub"])
def test_where_nobody_publishes_one_there_is_none(place, tmp_path):
    """No SHA256SUMS, one without the file, the text in Python, a small file of the hub."""
    with FakeHub({"x.parquet": DATA, "small.txt": b"x"}) as hub, FakeGCS():
        (tmp_path / "x.parquet").write_bytes(DATA)
        storage.write_atomic("gs://bucket/x.parquet", DATA)
        url = {
            "local": str(tmp_path / "x.parquet"),
            "gs": "gs://bucket/x.parquet",
            "https": hub.web("x.parquet"),
            "embedded": python_documentation(),
            "hub": f"{hub.source}/small.txt",
        }[place]
        assert expected_checksum(url) is None
        if place == "local":
            (tmp_path / "SHA256SUMS").write_text(f"{DIGEST}  other.parquet\n")
            assert expected_checksum(url) is None


@pytest.mark.parametrize("line", ["x.parquet", DIGEST, f"{DIGEST[:-1]}  x.parquet", "<html>"])
def test_a_list_that_is_none_is_refused(tmp_path, line):
    """The file and the line are named."""
    (tmp_path / "SHA256SUMS").write_text(f"{DIGEST}  a.parquet\n{line}\n")
    with pytest.raises(InputError, match="SHA256SUMS, line 2"):
        expected_checksum(str(tmp_path / "x.parquet"))


def test_a_path_without_a_folder(tmp_path, monkeypatch):
    """SHA256SUMS of the folder where one stands."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.parquet").write_bytes(DATA)
    (tmp_path / "SHA256SUMS").write_text(f"{DIGEST}  x.parquet\n")
    assert expected_checksum("x.parquet") == DIGEST
    verify_file("x.parquet", DIGEST)
