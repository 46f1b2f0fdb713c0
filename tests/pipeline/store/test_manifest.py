"""Manifests and ledgers: complete, or not there, or an error; never half."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from pipeline.errors import CorruptOutput, InputError, StorageError
from pipeline.identity import digests
from pipeline.store import integrity, storage
from pipeline.store.ledger import Ledger
from pipeline.store.manifest import Manifest, load, load_verified
from pipeline.store.shards import File, check_sizes
from tests.faults.fake_gcs import FakeGCS


def _publish(root, **changes):
    with storage.open_write(f"{root}/attempts/1/shards/a/data.bin") as file:
        file.write(b"0123456789")
    shard = Ledger(str(root)).add("a", f"{root}/attempts/1/shards/a", {"count": 10})
    fields = {
        "key": "k" * 64,
        "step": "s",
        "version": 1,
        "label": "s",
        "config": {},
        "inputs": {},
        "shards": (shard,),
        "result": {"x": 1},
        "content": digests.content((shard,), {"x": 1}, {}),
        "action": "",
        "build": "",
        "alias": None,
        "sources": {},
        "attempt": "1",
        "started": 0.0,
        "seconds": 1.0,
        "provenance": {},
        **changes,
    }
    manifest = Manifest(**fields)
    storage.create(f"{root}/manifest.json", manifest.to_bytes())
    return manifest


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    """Round trip through the store."""
    written = _publish(tmp_path)
    assert load(str(tmp_path)) == written
    assert load_verified(str(tmp_path), "k" * 64) == written


def test_a_number_that_is_none_is_refused_before_it_is_written(tmp_path):
    """A manifest or record with NaN would not read back, and its output would be lost."""
    tree = {"last": {"loss": float("nan")}, "rows": [1.0, float("inf")]}
    with pytest.raises(
        InputError, match=r"^result\.last\.loss, result\.rows\.1: expected a finite"
    ):
        _publish(tmp_path, result=tree)
    assert load(str(tmp_path)) is None
    with pytest.raises(InputError, match=r"result\.x: expected a finite number"):
        Ledger(str(tmp_path)).add("b", f"{tmp_path}/attempts/1/shards/a", {"x": float("inf")})


def test_another_key_in_the_same_place_is_refused(tmp_path):
    """The full key is compared, not only the part in the path."""
    _publish(tmp_path)
    with pytest.raises(CorruptOutput, match="expected"):
        load_verified(str(tmp_path), "k" * 63 + "x")


def test_content_digest_depends_on_content_alone(tmp_path):
    """Equal files give equal digests in another attempt and place; a changed byte does not."""
    first = _publish(tmp_path / "one")
    second = _publish(tmp_path / "two", attempt="2", started=9.0)
    assert first.content == second.content
    shard = first.shards[0]
    changed = msgspec.structs.replace(
        shard, files=(msgspec.structs.replace(shard.files[0], sha256="0" * 64),)
    )
    assert digests.content((changed,), first.result, {}) != first.content
    assert digests.content((shard,), {"x": 2}, {}) != first.content
    assert digests.content((shard,), first.result, {"a": "b"}) != first.content


def test_content_digest_ignores_measurements_and_believes_a_format_about_its_content(tmp_path):
    """Times do not count; a shard that says what it holds is known by that, not by its bytes."""
    shard = _publish(tmp_path).shards[0]
    plain = digests.content((shard,), {"x": 1}, {})
    assert plain == digests.content((shard,), {"x": 1, "measured": {"s": 3}, "headline": []}, {})
    said = msgspec.structs.replace(shard, result={"content": "c"})
    other = msgspec.structs.replace(said, files=())
    assert digests.content((said,), {}, {}) == digests.content((other,), {}, {})
    assert digests.content((said,), {}, {}) != digests.content((shard,), {}, {})


def test_the_first_record_of_a_shard_stands(tmp_path):
    """Two attempts at one shard: the ledger keeps the first, and tells the second."""
    ledger = Ledger(str(tmp_path))
    for attempt in ("1", "2"):
        with storage.open_write(f"{tmp_path}/attempts/{attempt}/x") as file:
            file.write(attempt.encode())
    first = ledger.add("part/0", f"{tmp_path}/attempts/1", {"n": 1})
    second = ledger.add("part/0", f"{tmp_path}/attempts/2", {"n": 2})
    assert first == second == ledger.find("part/0")
    assert list(ledger.finished()) == ["part/0"]
    ledger.drop("part/0", "1")
    assert ledger.finished() == {}


def test_what_was_measured_while_it_was_written_is_not_read_again(tmp_path, monkeypatch):
    """Its size must be that of the file; every other file is read."""
    ledger, directory = Ledger(str(tmp_path)), f"{tmp_path}/attempts/1"
    for name in ("known", "small"):
        with storage.open_write(f"{directory}/{name}") as file:
            file.write(name.encode())
    known = File("known", 5, hashlib.sha256(b"known").hexdigest(), "")
    read = []
    real = integrity.measure
    monkeypatch.setattr(integrity, "measure", lambda d, p, n: read.append(p) or real(d, p, n))
    shard = ledger.add("part/0", directory, {}, measured=[known])
    assert read == ["small"]
    assert shard.files == (known, File("small", 5, hashlib.sha256(b"small").hexdigest(), ""))
    with pytest.raises(StorageError, match="expected 6 bytes, just written, found 5"):
        ledger.add("part/1", directory, {}, measured=[msgspec.structs.replace(known, size=6)])
    with pytest.raises(StorageError, match="found no file"):
        ledger.add("part/1", directory, {}, measured=[msgspec.structs.replace(known, path="gone")])
    assert list(ledger.finished()) == ["part/0"]


@pytest.mark.parametrize("damage", ["", "missing", "cut"])
def test_sizes_in_a_bucket_are_listed_and_not_asked_for_one_by_one(damage):
    """A few requests for many files, and the file that is wrong is named."""
    with FakeGCS() as server:
        root = "gs://bucket/step"
        for number in range(50):
            storage.write_atomic(f"{root}/attempts/1/{number}", b"x" * number)
        shard = Ledger(root).add("part", f"{root}/attempts/1", {})
        if damage == "missing":
            storage.delete_tree(f"{root}/attempts/1/7")
        elif damage == "cut":
            storage.write_atomic(f"{root}/attempts/1/7", b"xx")
        before = server.requests
        if damage:
            with pytest.raises(CorruptOutput, match="attempts/1/7: expected 7 bytes"):
                check_sizes(root, (shard,), "build it again")
        else:
            check_sizes(root, (shard,), "build it again")
        assert server.requests - before < 10
        server.faults.stale = 10_000  # a listing that shows nothing of this is not believed
        if not damage:
            check_sizes(root, (shard,), "build it again")


def test_shards_outside_the_step_are_refused(tmp_path):
    """A shard's files live under the step's own directory."""
    for place in ("elsewhere", "step/ledger"):
        with pytest.raises(StorageError):
            Ledger(str(tmp_path / "step")).add("a", str(tmp_path / place), {})
