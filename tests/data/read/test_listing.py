"""What a source stands for: which files, which digests, what is pinned, and what is not read."""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.read import local_digest, retry
from data.read.listing import absolute, list_documents, list_folder, list_source
from data.read.work_units import list_units, read_units
from data.source import python_documentation
from pipeline.errors import InputError, StoreUnavailable
from pipeline.store import storage
from tests.faults.fake_gcs import FakeGCS
from tests.faults.fake_hub import COMMIT, FakeHub
from tests.faults.hub import quick_retries

SECONDS = 10.0


def listed(source):
    return list_source(str(source), SECONDS)


def names(listing):
    return [file.name for file in listing.files]


def write(folder, **content):
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        (folder / f"{name}.parquet").write_bytes(data)
    return folder


@pytest.fixture
def big(tmp_path, monkeypatch):
    """A Parquet file that is too large to be read as a whole while planning."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = tmp_path / "big" / "x.parquet"
    path.parent.mkdir()
    draw = random.Random(0)
    texts = [draw.randbytes(500).hex() for _ in range(12_000)]
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path, compression="none")
    assert path.stat().st_size > local_digest.WHOLE
    return path


def test_files_are_named_from_where_the_pattern_begins(tmp_path):
    """Below the last folder that the pattern fixes, in order, with their sizes."""
    write(tmp_path / "b", x=b"12")
    write(tmp_path / "a", x=b"1", y=b"123")
    listing = listed(tmp_path / "*" / "*.parquet")
    assert [(f.name, f.size) for f in listing.files] == [
        ("a/x.parquet", 1),
        ("a/y.parquet", 3),
        ("b/x.parquet", 2),
    ]
    assert names(listed(tmp_path / "b" / "x.parquet")) == ["x.parquet"]


def test_touched_and_moved_files_are_the_same_and_others_are_not(tmp_path):
    """The digest of the listing follows content and names, not times and places."""
    folder = write(tmp_path / "a", x=b"one", y=b"two")
    first = listed(folder / "*.parquet").digest
    os.utime(folder / "x.parquet", (1, 1))
    assert listed(folder / "*.parquet").digest == first
    shutil.move(folder, tmp_path / "elsewhere")
    folder = tmp_path / "elsewhere"
    assert listed(folder / "*.parquet").digest == first
    write(folder, x=b"eno")  # as long as it was
    changed = listed(folder / "*.parquet").digest
    (folder / "x.parquet").rename(folder / "z.parquet")
    assert len({first, changed, listed(folder / "*.parquet").digest}) == 3


@pytest.mark.slow
def test_a_large_file_written_anew_has_another_digest(big):
    """Of the same size: other texts everywhere, or only another footer."""
    first = listed(big).digest
    data = big.read_bytes()
    footer = int.from_bytes(data[-8:-4], "little")
    big.write_bytes(bytes(byte ^ 1 for byte in data[: -8 - footer]) + data[-8 - footer :])
    body = listed(big).digest
    place = len(data) - 8 - footer // 2
    big.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    assert len({first, body, listed(big).digest}) == 3


def test_of_a_large_file_little_is_read(big, monkeypatch):
    """The footer, the 16 blocks, and nothing else."""
    read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda f, n, at: read.append(n) or pread(f, n, at))
    listed(big)
    footer = int.from_bytes(big.read_bytes()[-8:-4], "little")
    assert sum(read) == 8 + 16 * local_digest.BLOCK + footer


def test_planning_again_reads_no_file(tmp_path, monkeypatch):
    """Digests are remembered while size, times and inode stay, and only then."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(local_digest, "_WORTH_KEEPING", 1)
    monkeypatch.setattr(local_digest, "_SETTLED_SECONDS", 0.0)
    folder = write(tmp_path / "a", x=b"one", y=b"two")
    time.sleep(0.05)
    first = listed(folder / "*.parquet")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", lambda *_: pytest.fail("a file was read again"))
        assert listed(folder / "*.parquet") == first
    before = (folder / "x.parquet").stat()
    (folder / "x.parquet").write_bytes(b"eno")
    os.utime(folder / "x.parquet", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert listed(folder / "*.parquet").digest != first.digest


def edited(path: Path, at: int) -> None:
    """Change bytes in place: size, footer and times of change stay."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"*" * 7)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_an_edit_of_a_large_file_between_the_samples_is_noticed(big, tmp_path, monkeypatch):
    """Each of several; and a plan after one reads nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(local_digest, "_SETTLED_SECONDS", 0.01)
    found = [listed(big)]
    for at in (300_000, 500_000, 700_000):
        time.sleep(0.03)
        edited(big, at)
        found.append(listed(big))
    digests = [listing.digest for listing in found]
    assert len(set(digests)) == 4
    time.sleep(0.03)
    assert listed(big).digest == digests[-1]
    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", lambda *_: pytest.fail("a file was read again"))
        assert listed(big).digest == digests[-1]
    big.touch()
    assert listed(big).digest == digests[-1], "its bytes are known"


@pytest.mark.parametrize("young", [True, False])
def test_an_edit_of_a_file_that_was_just_written_is_noticed(big, tmp_path, monkeypatch, young):
    """Also if it was listed within a tick of its times, and another file of its folder since."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(local_digest, "_SETTLED_SECONDS", 60.0 if young else 0.0)
    write(big.parent, small=b"one")
    time.sleep(0.03)
    first = listed(big)
    listed(big.parent / "small.parquet")
    edited(big, 300_000)
    assert listed(big).digest != first.digest


def test_a_machine_that_sees_an_edited_file_first_takes_it_for_the_recorded_one(
    big, tmp_path, monkeypatch
):
    """It knows the samples only; the one that saw the edit knows better, each time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "here"))
    before = listed(big)
    time.sleep(0.03)
    edited(big, 300_000)
    after = listed(big)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    there = listed(big)
    assert there.same_as(before.files)
    assert there.same_as(after.files)
    assert not after.same_as(before.files)
    assert not after.same_as(there.files)


def test_a_damaged_or_unwritable_cache_costs_time_only(tmp_path, monkeypatch):
    """No JSON, other JSON, and a folder that cannot be made."""
    monkeypatch.setattr(local_digest, "_WORTH_KEEPING", 1)
    monkeypatch.setattr(local_digest, "_SETTLED_SECONDS", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write(tmp_path / "a", x=b"one")
    first = listed(folder / "*.parquet")
    (cache,) = (tmp_path / "cache").rglob("*.json")
    for content in (b"{", b"[1]", b'{"a": 1}'):
        cache.write_bytes(content)
        assert listed(folder / "*.parquet") == first
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert listed(folder / "*.parquet") == first


def test_a_folder_that_the_pattern_matches_is_reported(tmp_path):
    """It is not read, and its name is kept for a message."""
    folder = write(tmp_path, x=b"one")
    (folder / "more.parquet").mkdir()
    listing = listed(folder / "*.parquet")
    assert names(listing) == ["x.parquet"]
    assert listing.skipped == ("more.parquet",)


@pytest.mark.parametrize("source", ["nothing/*.parquet", "nothing.parquet", "."])
def test_a_source_without_files_is_refused(tmp_path, source):
    """No match, no such file, a folder without any."""
    with pytest.raises(InputError, match="no file matches"):
        listed(tmp_path / source)


@pytest.mark.slow
def test_what_cannot_change_is_pinned_and_asked_of_nobody():
    """A full commit of the hub, and the text inside this Python; another Python's is refused."""
    with FakeHub({"x.parquet": b"x"}) as hub:
        listing = listed(f"{hub.source}/*.parquet")
        assert hub.log == []
    assert listing.pinned == f"commit {COMMIT}"
    other = listed("hf://datasets/owner/name@" + "b" * 40 + "/*.parquet")
    assert listing.digest != other.digest
    assert listed(python_documentation()).pinned.startswith("Python 3.")
    with pytest.raises(InputError, match=r"Python 3\.1\.4"):
        listed("python-docs://3.1.4")


@pytest.mark.parametrize("revision", ["", "@main"])
def test_a_branch_is_resolved_to_a_commit_and_its_files(revision):
    """Names, sizes and SHA-256 as the hub has them, and where the branch points."""
    with FakeHub({"data/x.parquet": b"one", "data/y.parquet": b"three"}) as hub:
        listing = listed(f"hf://datasets/owner/name{revision}/data/*.parquet")
        assert all("resolve" not in request.path for request in hub.log)
    assert (listing.branch, listing.revision, listing.pinned) == ("main", COMMIT, "")
    assert [(f.name, f.size, f.digest) for f in listing.files] == [
        (name, len(data), f"sha256 {hashlib.sha256(data).hexdigest()}")
        for name, data in (("x.parquet", b"one"), ("y.parquet", b"three"))
    ]


def test_objects_of_a_bucket_are_listed_by_content():
    """Written again with the same bytes they are the same, though their generation is not."""
    store = "gs://bucket"
    with FakeGCS(), quick_retries():
        storage.write_atomic(f"{store}/docs/x.parquet", b"one")
        storage.write_atomic(f"{store}/copy/x.parquet", b"one")
        first = listed(f"{store}/docs/*.parquet")
        assert listed(f"{store}/copy/*.parquet").digest == first.digest
        storage.write_atomic(f"{store}/docs/x.parquet", b"one")
        assert listed(f"{store}/docs/*.parquet").digest == first.digest
        storage.write_atomic(f"{store}/docs/x.parquet", b"eno")
        assert listed(f"{store}/docs/*.parquet").digest != first.digest


def test_files_of_a_web_server_are_listed_by_etag():
    """One file, and the links of a page that match."""
    with FakeHub({"a/x.parquet": b"one", "a/y.parquet": b"two", "a/z.txt": b"no"}) as hub:
        first = listed(hub.web("a/*.parquet"))
        assert names(first) == ["x.parquet", "y.parquet"]
        hub.files["a/y.parquet"] = b"owt"
        changed = listed(hub.web("a/*.parquet"))
        assert [a == b for a, b in zip(first.files, changed.files, strict=True)] == [True, False]
        assert listed(hub.web("a/x.parquet")).files == first.files[:1]


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_given_up_in_time(monkeypatch):
    """With what went wrong last, not only that the time is over.

    Doubling waits fill one second with five attempts at most, the twenty of a forgotten deadline
    with more; a slow machine makes fewer, and the last may then end before the refusal arrives.
    """

    def given_up(place):
        with pytest.raises(StoreUnavailable, match=r"failed [1-5] times in") as caught:
            list_source(place, 1.0)
        return str(caught.value)

    source = "hf://datasets/owner/name/*.parquet"
    with FakeHub({"x.parquet": b"x"}) as hub:  # so that the clients are imported
        assert names(listed(source)) == names(listed(hub.web("x.parquet")))
    with FakeHub({}) as hub, quick_retries(patience=20.0), monkeypatch.context() as patch:
        patch.setattr(retry, "FIRST_WAIT_SECONDS", 0.25)
        patch.setattr(retry, "LONGEST_WAIT_SECONDS", 1.0)
        hub._server.shutdown()
        hub._server.server_close()
        for place in (hub.web("x.parquet"), source):
            assert any("Connect" in given_up(place) for _ in range(5))


def test_a_folder_is_listed_to_its_leaves(tmp_path):
    """Hidden files and what Python writes beside code do not count; a folder must be there."""
    (tmp_path / "data").mkdir()
    (tmp_path / "mine.yaml").write_text("task: mine\n")
    (tmp_path / "data" / "items.jsonl").write_text("{}\n")
    first = list_folder(str(tmp_path), SECONDS)
    assert names(first) == ["data/items.jsonl", "mine.yaml"]
    for name in ("__pycache__", ".cache", "data/__pycache__"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "utils.pyc").write_bytes(b"x")
    (tmp_path / ".hidden").write_text("x")
    assert list_folder(str(tmp_path), SECONDS) == first
    (tmp_path / "data" / "items.jsonl").write_text("[]\n")
    assert list_folder(str(tmp_path), SECONDS).digest != first.digest
    for wrong in (tmp_path / "nowhere", tmp_path / "mine.yaml"):
        with pytest.raises(InputError, match="expected a folder"):
            list_folder(str(wrong), SECONDS)


def test_only_local_paths_are_made_absolute(tmp_path, monkeypatch):
    """From the folder of the caller; a URL stays as it is."""
    monkeypatch.chdir(tmp_path)
    assert absolute("docs/*.parquet") == f"{tmp_path}/docs/*.parquet"
    assert absolute("./a/../x.parquet") == f"{tmp_path}/x.parquet"
    for url in ("gs://b/x", "hf://datasets/a/b/*.parquet", python_documentation(), None):
        assert absolute(url) == url


@pytest.mark.parametrize("pattern", ["x.csv", "*.csv", "*.gz"])
def test_a_named_file_of_an_unsupported_format_is_refused(tmp_path, pattern):
    """While planning, before any work; a folder without it is read."""
    for name in ("x.csv", "x.parquet.gz", "x.txt"):
        (tmp_path / name).write_text("a,b")
    with pytest.raises(InputError, match=r"convert it|unpack the file"):
        list_documents(f"{tmp_path}/{pattern}", SECONDS)
    (tmp_path / "x.parquet.gz").unlink()
    assert names(list_documents(str(tmp_path), SECONDS)) == ["x.txt"]


def test_an_unsupported_format_on_the_hub_is_refused_without_a_request():
    """The source is pinned, so nothing is listed."""
    with pytest.raises(InputError, match=r"found a \.csv file"):
        list_documents(f"hf://datasets/owner/name@{COMMIT}/data/*.csv", SECONDS)


NAMES = (
    *("what is rain?.txt", "why?.jsonl", "page [1].txt", "a*b.jsonl", "[!x].jsonl", "x?y.jsonl.gz"),
    *("data [1]/a.txt", "q?/b.jsonl", "a::b.txt", "zip::x.jsonl", "s3:x.jsonl", "x#y.jsonl"),
    *("~x.txt", "%41.txt", "{a,b}.jsonl", "a].txt", "x?.parquet"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_local_name_is_a_name(tmp_path, name):
    """Whatever it would mean as a pattern or a URL: named alone, in its folder, and with others."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    line = b'{"text": "a"}' if ".jsonl" in name else b"a"
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": ["a"]}), path)
    else:
        path.write_bytes(gzip.compress(line) if name.endswith(".gz") else line)
    (tmp_path / "b.txt").write_text("b")
    for source, texts in ((path, ["a"]), (tmp_path, ["a", "b"])):
        batches = list(read_units(list_units(str(source)), ("text",)))
        assert sorted(t for b in batches for t in b["text"].to_pylist()) == texts
        assert len(listed(source).files) == len(texts)


def test_a_name_that_also_matches_others_is_refused(tmp_path):
    """Reading one of them could be reading a part."""
    for name in ("s*.txt", "s1.txt", "page [1].txt", "page 1.txt"):
        (tmp_path / name).write_text("a")
    for name in ("s*.txt", "page [1].txt"):
        with pytest.raises(InputError, match=r"exists, and as a pattern it matches others too"):
            listed(tmp_path / name)
    assert names(listed(tmp_path / "page [[]1].txt")) == ["page [1].txt"]
    assert len(listed(tmp_path).files) == 4


@pytest.mark.parametrize("inside", [True, False])
def test_a_pipe_is_refused_without_waiting(tmp_path, inside):
    """Nobody may ever write to it, and it can be read once only."""
    os.mkfifo(tmp_path / "x.jsonl")
    source = tmp_path if inside else tmp_path / "x.jsonl"
    for read in (listed, lambda source: list_units(str(source))):
        with pytest.raises(InputError, match=r"x\.jsonl: expected a file.*found a pipe"):
            read(source)
